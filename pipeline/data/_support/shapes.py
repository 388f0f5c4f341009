"""The shapes of rows in public data: which of their fields hold the turns of a conversation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.data._support.chat_template import ANSWERS, UnreadableRowError
from pipeline.data._support.row_values import checked_text, decoded, type_name

MESSAGES = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat", "contents")
"""Fields with a list of turns, each an object with a role and a content."""
ROLE, CONTENT = ("role", "from"), ("content", "value", "parts")
"""Fields of a turn."""
BOTH = ("human", ANSWERS)
"""Fields of a turn that has a question and its answer."""
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
SYSTEM = ("system", "system_prompt", "system_message", "systemInstruction")
HISTORY = "history"
"""Earlier questions with their answers, a pair each."""
NO_TURNS = "have messages that are not a list of objects with role and content"
NO_PAIR = "have no pair of answers (chosen and rejected)"
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
NAME_PAIR = "name their fields: --chat.fields.prompt NAME --chat.fields.completion NAME"
NAME_TURNS = "name their fields: --chat.fields.role NAME --chat.fields.content NAME"
"""Remedies where the fields have names of their own."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows are read."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """The names that rows have for prompt, input, completion, system, history, messages, role, content, tools."""
    answer: str | None = None
    """The answer of a preference pair that is read, CHOSEN or REJECTED; None: such rows are refused."""
    needs_pairs: bool = False
    """Whether rows of other shapes are refused."""


def renamed(row: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """Return a row with the named fields under the names that this module has for them, and no others of its shapes."""
    names = {theirs: ours for ours, theirs in reading.fields.items() if ours not in ("role", "content")}
    if not names:  # those of turns alone
        return dict(row)
    found = {ours: row[theirs] for theirs, ours in names.items() if theirs in row}
    if not {*found} & {"messages", "prompt"}:
        raise UnreadableRowError("do not have the fields that chat.fields names", f"its fields: {_listed(row)}")
    of_shapes = {*MESSAGES, CHOSEN, REJECTED, *(name for pair in PAIRS for name in (pair.prompt, pair.completion))}
    return {name: value for name, value in row.items() if name not in names and name not in of_shapes} | found


def turns_of(row: Mapping[str, Any], reading: Reading) -> tuple[str, list[Any], set[str]]:
    """Return the shape of a row, its turns, and the fields that they were read from."""
    messages = next((name for name in MESSAGES if row.get(name) is not None), None)
    if CHOSEN in row and (REJECTED in row or reading.answer) and (messages is None or _asks(row[messages])):
        return _answered(row, messages, reading)
    if reading.needs_pairs:
        raise UnreadableRowError(NO_PAIR, f"its fields: {_listed(row)}")
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
    return bool(turns) and role_of(turns[-1], Reading()) != ANSWERS


def _answered(row: Mapping[str, Any], messages: str | None, reading: Reading) -> tuple[str, list[Any], set[str]]:
    """Return the turns of a preference pair with one of its answers."""
    if reading.answer is None:
        raise UnreadableRowError(
            "are preference pairs (chosen and rejected)",
            remedy="to train on both: fitproof main {chat} --task dpo --sequences padded; to train the chosen answers: "
            "fitproof main {chat} --chat.train_chosen true",
        )
    if row.get(reading.answer) is None:
        raise UnreadableRowError(NO_PAIR, f"its fields: {_listed(row)}")
    given = row[reading.answer]
    answer = _part([given] if isinstance(given, Mapping) else given, ANSWERS)
    before = next((name for name in PROMPTS if name in row), None)
    if any(role_of(turn, reading) != ANSWERS for turn in _list_of_turns(answer)[:1]):  # the whole conversation
        return "preference pairs", answer, {reading.answer, before or reading.answer}
    if before is None:
        raise UnreadableRowError(f"have a {reading.answer} answer, and no prompt before it")
    if messages is not None:
        question = _list_of_turns(row[messages])
    else:
        pair = Pair(name="", prompt=before, completion=CHOSEN, more=("input",))
        question = [*_history(row), *_part(_question(row, pair), "user")]
    return "preference pairs", [*question, *answer], {reading.answer, before, "input", HISTORY}


def _question(row: Mapping[str, Any], pair: Pair) -> Any:
    """Return the question of a row, with the text that follows it."""
    prompt = row[pair.prompt]
    more = [checked_text(row[name]) for name in pair.more if row.get(name)]
    if not more:
        return prompt
    if not isinstance(prompt, str):
        raise UnreadableRowError("have a question of several turns, and a field with more text for it")
    return "\n".join([prompt, *more] if prompt else more)


def _history(row: Mapping[str, Any]) -> list[Any]:
    """Return the turns of earlier questions and answers."""
    history = decoded(row.get(HISTORY) or [])
    if not isinstance(history, list) or not all(isinstance(each, list) and len(each) == 2 for each in history):
        raise UnreadableRowError("have a history that is not a list of pairs, each a question and its answer")
    return [turn for asked, answered in history for turn in (*_part(asked, "user"), *_part(answered, ANSWERS))]


def _part(value: Any, role: str) -> list[Any]:
    """Return a prompt or a completion as turns, which it may be already."""
    if isinstance(value, str) and value.lstrip()[:2] in ("[{", "[ "):
        turns = decoded(value)
        if isinstance(turns, list) and all(isinstance(turn, Mapping) and "role" in turn for turn in turns):
            value = turns
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _list_of_turns(value: Any) -> list[Any]:
    """Return turns, which may be JSON text, or a list for each of their fields."""
    turns = decoded(value)
    if isinstance(turns, Mapping) and all(isinstance(each, list) for each in turns.values()):
        turns = [dict(zip(turns, each, strict=False)) for each in zip(*turns.values(), strict=False)]
    if isinstance(turns, str):
        raise UnreadableRowError(NO_TURNS, "text that is no JSON")
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise UnreadableRowError(NO_TURNS)
    return [part for turn in turns for part in _parted(turn)]


def _parted(turn: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a turn, or the two of one that has a question and its answer (ShareGPT in Chinese)."""
    if not {*BOTH} <= {*turn}:
        return [turn]
    return [{"role": ROLES.get(name, name), "content": turn[name]} for name in BOTH]


def role_of(turn: Mapping[str, Any], reading: Reading) -> str:
    """Return the role of a turn, by the name that chat templates have for it."""
    names = (reading.fields["role"],) if "role" in reading.fields else ROLE
    role = next((turn[name] for name in names if name in turn), None)
    if role is None:
        raise UnreadableRowError("have a message without a role", f"its fields: {_listed(turn)}", NAME_TURNS)
    if not isinstance(role, str):
        raise UnreadableRowError("have a message whose role or content is not text", f"role: {type_name(role)}")
    return ROLES.get(role.strip().lower(), role.strip().lower())


def _unknown(row: Mapping[str, Any]) -> UnreadableRowError:
    detail = f"its fields: {_listed(row)}"
    for names, reason, command in OTHER_SHAPES:
        if {*names} <= {*row}:
            return UnreadableRowError(reason, detail, command)
    lists = {name: value for name, value in row.items() if isinstance(value, list) and value}
    turns = next((name for name, (first, *_) in lists.items() if isinstance(first, Mapping) and len(first) > 1), None)
    remedy = NAME_PAIR if turns is None else f"name the field of their messages: --chat.fields.messages {turns}"
    return UnreadableRowError("have neither messages nor a prompt with a completion", detail, remedy)


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "none"
