"""The conversation of a row: its messages, its tools, and what of it is not to be trained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from pipeline.data._support.chat_template import ANSWERS, REASONING, Message, UnreadableRowError
from pipeline.data._support.row_values import checked_text, decoded, parsed, type_name
from pipeline.data._support.shapes import (
    CHOSEN,
    CONTENT,
    NO_TURNS,
    REJECTED,
    ROLE,
    SYSTEM,
    Reading,
    renamed,
    role_of,
    turns_of,
)

CALL = "function_call"
"""ShareGPT's role of an answer that calls a function, and the older field of OpenAI's messages for one."""
TOOLS, FUNCTIONS = "tools", "functions"
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
MARKS = ("weight", "train", "training", "trainable", "loss")
"""Fields of a turn, or of a row, that say whether it is trained: OpenAI's, axolotl's, ms-swift's."""
MARKS_OF_ROWS = ("label", "kto_tag", *MARKS)
PARTIAL_MARKS = ("train_detail", "training_detail")
"""Fields that say which parts of a turn are trained."""
UNCLEAR_MARK = "mask"
"""A field that leaves a turn out of training in some tools, and keeps it in others."""
OTHER_MEDIA = ("images", "image", "videos", "video", "audios", "audio")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation, and what of its row it is made of."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None
    """The functions that it declares, for the template; None if it has none."""
    template_arguments: Mapping[str, Any]
    """More variables of the template."""
    untrained: frozenset[int]
    """Numbers of the answers that are no targets."""
    shape: str
    unread: frozenset[str]
    """Fields of the row that are not read."""
    is_plain: bool
    """Whether messages_of() finds the same in the row, and nothing else of the row is read."""


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row, which may have a prompt and a completion instead."""
    if row.get("messages") is not None:
        turns = row["messages"]
    else:
        parts = ((row["prompt"], "user"), (row["completion"], "assistant"))
        turns = [
            turn
            for part, role in parts
            for turn in (part if isinstance(part, list) else [{"role": role, "content": part}])
        ]
    return [{name: value for name, value in turn.items() if value is not None} for turn in turns]


def read_conversation(row: Any, reading: Reading) -> Conversation:
    """Return the conversation of a row, which a line of JSON Lines has as text.

    Raises:
        UnreadableRowError: it has none, or nothing of it is to be trained.

    """
    given = row = parsed(row)
    if reading.fields:
        row = renamed(row, reading)
    _refuse_other_media(row)
    shape, turns, read = turns_of(row, reading)
    messages = [_message(turn, reading) for turn in turns]
    system = next((name for name in SYSTEM if row.get(name)), None)
    if system and not (messages and messages[0]["role"] in ("system", "developer")):
        given_system = row[system].get("parts") if isinstance(row[system], Mapping) else row[system]
        messages.insert(0, {"role": "system", "content": _content(given_system)})
        read |= {system}
    tools = _tools_of(row)
    arguments = decoded(row.get(TEMPLATE_ARGUMENTS) or {})
    if not isinstance(arguments, Mapping):
        raise UnreadableRowError(f"have {TEMPLATE_ARGUMENTS} that are no object", type(arguments).__name__)
    for name in MARKS_OF_ROWS:
        mark = _mark(row.get(name))
        if mark is False:
            raise UnreadableRowError("are marked as not to be trained", f"{name}: {json.dumps(row[name])}")
        read |= {name} if mark else set()
    untrained = frozenset(number for number, message in enumerate(messages) if not _is_trained(message))
    messages = [{name: value for name, value in message.items() if name not in MARKS} for message in messages]
    _check_answers(messages, untrained)
    read |= {TOOLS, FUNCTIONS, TEMPLATE_ARGUMENTS}
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        template_arguments=arguments,
        untrained=untrained,
        shape=shape,
        unread=frozenset(name for name, value in given.items() if value not in ("", [], {}))
        - {reading.fields.get(name, name) for name in read},
        is_plain=not (tools or arguments or untrained or any("tool_calls" in each for each in messages))
        and _is_plain(given, messages),
    )


def read_pair(row: Any, reading: Reading) -> tuple[Conversation, Conversation]:
    """Return the conversations of a row with its chosen and with its rejected answer; targets are what differs.

    Raises:
        UnreadableRowError: it has none, or nothing of it is to be trained.

    """
    row = parsed(row)
    chosen, rejected = (read_conversation(row, replace(reading, answer=answer)) for answer in (CHOSEN, REJECTED))
    both = zip(chosen.messages[:-1], rejected.messages[:-1], strict=False)
    num_shared = sum(1 for _ in takewhile(lambda turns: turns[0] == turns[1], both))
    shared, unread = frozenset(range(num_shared)), chosen.unread & rejected.unread
    first, second = (replace(one, untrained=one.untrained | shared, unread=unread) for one in (chosen, rejected))
    return first, second


def _message(turn: Any, reading: Reading) -> dict[str, Any]:
    """Return a turn as a message: its role and its content, which is text, first."""
    if not isinstance(turn, Mapping):
        raise UnreadableRowError(NO_TURNS)
    names = (reading.fields["content"],) if "content" in reading.fields else CONTENT
    content_name = next((name for name in names if name in turn), "")
    role_names = (reading.fields.get("role", ""), *ROLE)
    given = str(next((turn[name] for name in role_names if name in turn), "")).strip().lower()
    role, content = role_of(turn, reading), turn.get(content_name, "")
    rest = {name: value for name, value in turn.items() if name not in (content_name, *role_names)}
    for name in PARTIAL_MARKS:
        if rest.get(name):
            raise UnreadableRowError("have a message of which only parts are to be trained", name)
    if rest.get(UNCLEAR_MARK) is not None:
        raise UnreadableRowError(
            "have a message with the field mask, which some tools train and others do not; write train or weight",
            UNCLEAR_MARK,
        )
    calls = decoded(rest.pop("tool_calls", None)) or []
    if given == CALL or CALL in rest:
        role, called = ANSWERS, rest.pop(CALL, None)
        calls, content = [*calls, *_calls(content if called is None else called)], "" if called is None else content
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UnreadableRowError("have tool calls that are not a list of objects")
    return {"role": role, "content": _content(content), **({"tool_calls": calls} if calls else {}), **rest}


def _calls(value: Any) -> list[Any]:
    """Return calls of functions as tool calls."""
    calls = decoded(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise UnreadableRowError("have a function call that is no object with name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _content(value: Any) -> str:
    """Return the content of a message as text: a list of parts of text is one text."""
    if isinstance(value, list):
        kinds = {_kind(part) for part in value}
        if kinds - {"text"}:
            raise UnreadableRowError("have a message with parts that are no text", ", ".join(sorted(kinds - {"text"})))
        return "".join(checked_text(part.get("text", "") if isinstance(part, Mapping) else part) for part in value)
    return checked_text(value)


def _kind(part: Any) -> str:
    """Return the kind of a part of a message, which Gemini's format names by its field."""
    if not isinstance(part, Mapping):
        return "text"
    return str(part.get("type", "text" if "text" in part else next(iter(part), "none")))


def _tools_of(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...] | None:
    """Return the tools of a row, or its functions as tools."""
    tools, functions = decoded(row.get(TOOLS)), decoded(row.get(FUNCTIONS))
    found = tools or functions or []
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise UnreadableRowError("have tools that are not a list of objects", type_name(found))
    return tuple(found if tools else ({"type": "function", "function": each} for each in found)) or None


def _refuse_other_media(row: Mapping[str, Any]) -> None:
    for name in OTHER_MEDIA:
        if row.get(name):
            raise UnreadableRowError("have images, video or sound, which are not trained", name)


def _mark(value: Any) -> bool | None:
    """Return whether a mark allows training; None if the field is none."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def _is_trained(message: Message) -> bool:
    """Return whether the marks of a message allow its training."""
    given = {name: _mark(message[name]) for name in MARKS if name in message}
    for name, mark in given.items():
        if mark is None:
            raise UnreadableRowError("have a message with a mark that is neither 0 nor 1", name)
        if mark and message["role"] != ANSWERS:
            raise UnreadableRowError(f"have a message that is to be trained, and is none of the {ANSWERS}", name)
    return False not in given.values()


def _check_answers(messages: Sequence[Message], untrained: frozenset[int]) -> None:
    answers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
    filled = [number for number in answers if number in untrained or _says_something(messages[number])]
    if not answers or filled != answers:
        raise UnreadableRowError(f"have no answer: a message of the role {ANSWERS} that is not empty")
    if answers[0] == 0:
        raise UnreadableRowError("begin with an answer, and have no question before it")


def _says_something(message: Message) -> bool:
    return bool(message["content"].strip() or any(message.get(name) for name in ("tool_calls", *REASONING)))


def _is_plain(row: Mapping[str, Any], messages: Sequence[Message]) -> bool:
    try:
        return messages_of(row) == list(messages)
    except (KeyError, AttributeError, TypeError):
        return False
