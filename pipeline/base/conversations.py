"""The conversation of a row, in whichever of the known shapes the row is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.base.chat_template import ANSWERS, REASONING, Message, UnreadableRowError

MESSAGES = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat")
"""Fields with a list of turns, each an object with a role and a content."""
ROLE, CONTENT = ("role", "from"), ("content", "value")
"""Fields of a turn."""
ROLES: Mapping[str, str] = {
    "human": "user",
    "prompter": "user",
    "gpt": ANSWERS,
    "chatgpt": ANSWERS,
    "bot": ANSWERS,
    "model": ANSWERS,
    "ai": ANSWERS,
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
"""Names that public data has for the roles of a chat template."""
CALL = "function_call"
"""ShareGPT's role of an answer that calls a function, and the older field of OpenAI's messages for one."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A shape whose rows have a question and its answer in fields of their own."""

    name: str
    prompt: str
    completion: str
    more: tuple[str, ...] = ()
    """Fields whose text follows the question, after a newline."""


PAIRS = (
    Pair(name="Alpaca", prompt="instruction", completion="output", more=("input",)),
    Pair(name="Dolly", prompt="instruction", completion="response", more=("context", "input")),
    Pair(name="prompt and completion", prompt="prompt", completion="completion", more=("context",)),
    Pair(name="prompt and response", prompt="prompt", completion="response", more=("context",)),
    Pair(name="question and answer", prompt="question", completion="answer", more=("context",)),
    Pair(name="question and response", prompt="question", completion="response", more=("context",)),
    Pair(name="query and response", prompt="query", completion="response"),
    Pair(name="problem and solution", prompt="problem", completion="solution"),
    Pair(name="input and output", prompt="input", completion="output"),
)
"""The first one whose fields a row has is its shape."""
NAMED = Pair(name="chat.fields", prompt="prompt", completion="completion", more=("input",))
"""The shape of rows whose fields the settings name."""
PROMPTS = ("prompt", "instruction", "question", *MESSAGES)
"""Fields that may hold what comes before the chosen answer of a preference pair."""
CHOSEN, REJECTED = "chosen", "rejected"
SYSTEM = ("system", "system_prompt", "system_message")
HISTORY = "history"
"""Earlier questions with their answers, a pair each."""
TOOLS, FUNCTIONS = "tools", "functions"
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
MARKS = ("weight", "train", "training", "trainable", "loss")
"""Fields of a turn, or of a row, that say whether it is trained: OpenAI's, axolotl's, ms-swift's."""
MARKS_OF_ROWS = ("label", "kto_tag", *MARKS)
PARTIAL_MARKS = ("train_detail", "training_detail")
"""Fields that say which parts of a turn are trained."""
OTHER_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
NO_TURNS = "have messages that are not a list of objects with role and content"
TEXT_COMMAND = "read them with: fitproof main {text}"
OTHER_SHAPES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("input_ids",), "are token ids already (input_ids), which are not read", ""),
    (("preferred_output",), "are preference pairs of OpenAI's format (preferred_output), which are not read", ""),
    (("segments",), "are segments of text with a label each (axolotl's input_output), which are not read", ""),
    (("message_id", "text"), "are single messages of a tree (OASST), which is not put together", ""),
    (("prompt", "completions", "labels"), "are steps with a label each (stepwise supervision), which are not read", ""),
    (("text",), "have neither messages nor a prompt with a completion: they are documents", TEXT_COMMAND),
)
"""Shapes that are no conversations, by their fields, with what a refusal says and the command that reads them."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows are read."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """The names that rows have for prompt, input, completion, system, history, messages, role, content, tools."""
    train_chosen: bool = False
    """Whether the chosen answer of a preference pair is read."""


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
    given = row = without_nulls(_parsed(row))
    if reading.fields:
        row = _renamed(row, reading)
    _refuse_other_media(row)
    shape, turns, read = _turns_of(row, reading)
    messages = [_message(turn, reading) for turn in turns]
    system = next((name for name in SYSTEM if row.get(name)), None)
    if system and not (messages and messages[0]["role"] in ("system", "developer")):
        messages.insert(0, {"role": "system", "content": _checked_text(row[system])})
        read |= {system}
    tools = _tools_of(row)
    arguments = _decoded(row.get(TEMPLATE_ARGUMENTS) or {})
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
        unread=frozenset(given) - {reading.fields.get(name, name) for name in read},
        is_plain=not (tools or arguments or untrained or any("tool_calls" in each for each in messages))
        and _is_plain(given, messages),
    )


def without_nulls(value: Any) -> Any:
    """Return a value without what is null in its objects, which Parquet adds where other rows have a field."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _parsed(row: Any) -> Mapping[str, Any]:
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except ValueError as error:
            raise UnreadableRowError("are not JSON", getattr(error, "msg", str(error))) from error
        except RecursionError as error:
            raise UnreadableRowError("are nested too deeply") from error
    if not isinstance(row, Mapping):
        raise UnreadableRowError("are not objects with names")
    return row


def _decoded(value: Any) -> Any:
    """Return a value that a field may also have as JSON text; text that is none is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        return without_nulls(json.loads(value))
    except (ValueError, RecursionError):
        return value


def _renamed(row: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """Return a row with the named fields under the names that this module has for them, and no others of its shapes."""
    names = {theirs: ours for ours, theirs in reading.fields.items() if ours not in ("role", "content")}
    renamed = {ours: row[theirs] for theirs, ours in names.items() if theirs in row}
    if not {*renamed} & {"messages", "prompt"}:
        raise UnreadableRowError("do not have the fields that chat.fields names", f"its fields: {_listed(row)}")
    of_shapes = {*MESSAGES, CHOSEN, REJECTED, *(name for pair in PAIRS for name in (pair.prompt, pair.completion))}
    return {name: value for name, value in row.items() if name not in names and name not in of_shapes} | renamed


def _turns_of(row: Mapping[str, Any], reading: Reading) -> tuple[str, list[Any], set[str]]:
    """Return the shape of a row, its turns, and the fields that they were read from."""
    messages = next((name for name in MESSAGES if row.get(name) is not None), None)
    if CHOSEN in row and (REJECTED in row or reading.train_chosen) and (messages is None or _asks(row[messages])):
        return _chosen(row, messages, reading)
    if messages is not None:
        turns = _list_of_turns(row[messages])
        is_sharegpt = any("from" in turn for turn in turns)
        return ("ShareGPT" if is_sharegpt else messages), turns, {messages}
    pairs = (NAMED, *PAIRS) if reading.fields else PAIRS
    pair = next((each for each in pairs if each.prompt in row and each.completion in row), None)
    if pair is None:
        raise _unknown(row)
    turns = [*_history(row), *_part(_question(row, pair), "user"), *_part(row[pair.completion], ANSWERS)]
    return pair.name, turns, {pair.prompt, pair.completion, *pair.more, HISTORY}


def _asks(messages: Any) -> bool:
    """Whether messages end without an answer, which a preference pair has beside them."""
    turns = _list_of_turns(messages)
    return bool(turns) and _role(turns[-1], Reading()) != ANSWERS


def _chosen(row: Mapping[str, Any], messages: str | None, reading: Reading) -> tuple[str, list[Any], set[str]]:
    """Return the turns of a preference pair with the chosen answer."""
    if not reading.train_chosen:
        raise UnreadableRowError(
            "are preference pairs (chosen and rejected)",
            remedy="to train the chosen answers: fitproof main {chat} --chat.train_chosen true",
        )
    chosen = row[CHOSEN]
    answer = (
        _list_of_turns([chosen] if isinstance(chosen, Mapping) else chosen) if not isinstance(chosen, str) else chosen
    )
    before = next((name for name in PROMPTS if name in row), None)
    if isinstance(answer, list) and len(answer) > 1:  # the whole conversation
        return "preference pairs", answer, {CHOSEN, before or CHOSEN}
    if before is None:
        raise UnreadableRowError("have a chosen answer, and no prompt before it")
    if messages is not None:
        question: list[Any] = _list_of_turns(row[messages])
    else:
        question = [
            *_history(row),
            *_part(_question(row, Pair(name="", prompt=before, completion="", more=("input",))), "user"),
        ]
    return "preference pairs", [*question, *_part(answer, ANSWERS)], {CHOSEN, before, "input", HISTORY}


def _question(row: Mapping[str, Any], pair: Pair) -> Any:
    """Return the question of a row, with the text that follows it."""
    prompt = row[pair.prompt]
    more = [_checked_text(row[name]) for name in pair.more if row.get(name)]
    if not more:
        return prompt
    if not isinstance(prompt, str):
        raise UnreadableRowError("have a question of several turns, and a field with more text for it")
    return "\n".join([prompt, *more] if prompt else more)


def _history(row: Mapping[str, Any]) -> list[Any]:
    """Return the turns of earlier questions and answers."""
    history = _decoded(row.get(HISTORY) or [])
    if not isinstance(history, list) or not all(isinstance(each, list) and len(each) == 2 for each in history):
        raise UnreadableRowError("have a history that is not a list of pairs, each a question and its answer")
    return [turn for asked, answered in history for turn in (*_part(asked, "user"), *_part(answered, ANSWERS))]


def _part(value: Any, role: str) -> list[Any]:
    """Return a prompt or a completion as turns, which it may be already."""
    if isinstance(value, str) and value.lstrip()[:2] in ("[{", "[ "):
        decoded = _decoded(value)
        value = decoded if isinstance(decoded, list) and all("role" in turn for turn in decoded) else value
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _list_of_turns(value: Any) -> list[Any]:
    """Return turns, which may be JSON text, or a list for each of their fields."""
    turns = _decoded(value)
    if isinstance(turns, Mapping) and all(isinstance(each, list) for each in turns.values()):
        turns = [dict(zip(turns, each, strict=False)) for each in zip(*turns.values(), strict=False)]
    if isinstance(turns, str):
        raise UnreadableRowError(NO_TURNS, "text that is no JSON")
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise UnreadableRowError(NO_TURNS)
    return turns


def _role(turn: Mapping[str, Any], reading: Reading) -> str:
    names = (reading.fields["role"],) if "role" in reading.fields else ROLE
    role = next((turn[name] for name in names if name in turn), None)
    if not isinstance(role, str):
        raise UnreadableRowError("have a message whose role or content is not text", f"role: {_type(role)}")
    return ROLES.get(role.strip().lower(), role.strip().lower())


def _message(turn: Any, reading: Reading) -> dict[str, Any]:
    """Return a turn as a message: its role and its content, which is text, first."""
    if not isinstance(turn, Mapping):
        raise UnreadableRowError(NO_TURNS)
    names = (reading.fields["content"],) if "content" in reading.fields else CONTENT
    content_name = next((name for name in names if name in turn), "")
    role_names = (reading.fields.get("role", ""), *ROLE)
    given = str(next((turn[name] for name in role_names if name in turn), "")).strip().lower()
    role, content = _role(turn, reading), turn.get(content_name, "")
    rest = {name: value for name, value in turn.items() if name not in (content_name, *role_names)}
    for name in PARTIAL_MARKS:
        if rest.get(name):
            raise UnreadableRowError("have a message of which only parts are to be trained", name)
    calls = _decoded(rest.pop("tool_calls", None)) or []
    if given == CALL or CALL in rest:
        role, called = ANSWERS, rest.pop(CALL, None)
        calls, content = [*calls, *_calls(content if called is None else called)], "" if called is None else content
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UnreadableRowError("have tool calls that are not a list of objects")
    return {"role": role, "content": _content(content), **({"tool_calls": calls} if calls else {}), **rest}


def _calls(value: Any) -> list[Any]:
    """Return calls of functions as tool calls."""
    calls = _decoded(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise UnreadableRowError("have a function call that is no object with name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _content(value: Any) -> str:
    """Return the content of a message as text: a list of parts of text is one text."""
    if isinstance(value, list):
        kinds = {str(part.get("type", "text")) if isinstance(part, Mapping) else "text" for part in value}
        if kinds - {"text"}:
            raise UnreadableRowError("have a message with parts that are no text", ", ".join(sorted(kinds - {"text"})))
        return "".join(_checked_text(part.get("text", "") if isinstance(part, Mapping) else part) for part in value)
    return _checked_text(value)


def _checked_text(value: Any) -> str:
    """Return text of a row.

    Raises:
        UnreadableRowError: it is no text, or half of a character is in it.

    """
    if not isinstance(value, str):
        raise UnreadableRowError("have a message whose role or content is not text", _type(value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnreadableRowError(
            "have half of a character in their text (a lone surrogate)", f"{value[error.start]!r}"
        ) from error
    return value


def _type(value: Any) -> str:
    return "none" if value is None else type(value).__name__


def _tools_of(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...] | None:
    """Return the tools of a row, or its functions as tools."""
    functions = _decoded(row.get(FUNCTIONS)) or []
    tools = _decoded(row.get(TOOLS)) or [{"type": "function", "function": each} for each in functions]
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UnreadableRowError("have tools that are not a list of objects", _type(tools))
    return tuple(tools) or None


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


def _unknown(row: Mapping[str, Any]) -> UnreadableRowError:
    detail = f"its fields: {_listed(row)}"
    for names, reason, command in OTHER_SHAPES:
        if {*names} <= {*row}:
            return UnreadableRowError(reason, detail, command)
    return UnreadableRowError(
        "have neither messages nor a prompt with a completion",
        detail,
        "name their fields: --chat.fields.prompt NAME --chat.fields.completion NAME",
    )


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "none"
