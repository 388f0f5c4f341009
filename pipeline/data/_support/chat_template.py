"""Conversations as tokens, by the chat template of a tokenizer; the answers alone are targets."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.base.errors import InvalidInputError
from pipeline.data._support.tokenizer import SEPARATOR, load_tokenizer, train_tokenizer

Message = Mapping[str, Any]
"""A turn of a conversation: its role and its content, both text, and what else the template reads."""
ANSWERS = "assistant"
"""The role whose turns are targets."""
TURN_MARKS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ (call['function'] or call) | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of tokenizers that are trained on a corpus: ChatML, as of Qwen and SmolLM2."""
MARKED_ANSWERS = re.compile(r"{%-?\s*generation\s*-?%}")
"""The words with which a template itself marks the answers."""
TODAY = re.compile(r"""strftime_now\(\s*(["'])(?P<format>.*?)\1\s*\)""")
"""The date of the day in a template."""
DAY = date(2024, 7, 26)
"""The date that takes its place, so that data are the same on every day; Llama 3's templates have it by default."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character, which no tokenizer takes."""
PLACEHOLDER = "\ufdd0"
"""A noncharacter of Unicode: no text has it."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message with what an answer is thought out by."""
ENCODING = 4
"""The version of the cached tokens: another number where those of a conversation, or what is held out, change."""


class UnreadableRowError(Exception):
    """A row of a corpus that is no conversation: the reason, what is particular to it, and what reads such rows."""

    def __init__(self, reason: str, detail: str = "", remedy: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail, self.remedy = reason, detail, remedy


def trained_chat_template(conversations: Iterable[Sequence[Message]], vocabulary_size: int) -> "ChatTemplate":
    """Return TEMPLATE with a tokenizer that is trained on what the messages say."""
    from transformers import PreTrainedTokenizerFast

    texts = (f"{message['role']}\n{message['content']}" for messages in conversations for message in messages)
    trained = train_tokenizer(texts, vocabulary_size, (SEPARATOR, *TURN_MARKS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=TURN_MARKS[1], chat_template=TEMPLATE)
    return ChatTemplate(tokenizer)


def load_chat_template(name: str) -> "ChatTemplate":
    """Return the chat template of a published model or a folder, with its tokenizer.

    Raises:
        InvalidInputError: the tokenizer cannot be loaded, is no fast one, or has no template, or several alike.

    """
    tokenizer = load_tokenizer(name)
    template = tokenizer.chat_template
    if not template:
        raise InvalidInputError(
            f"corpus=chat needs a tokenizer with a chat template, and that of {name} has none; take the model's "
            "instruction-tuned version, or a local folder with a chat_template.jinja"
        )
    if isinstance(template, dict) and "default" not in template:
        raise InvalidInputError(
            f"corpus=chat takes the chat template with the name default, and the tokenizer of {name} has "
            f"{', '.join(sorted(template))}; take a local folder with the right one as chat_template.jinja"
        )
    if not tokenizer.is_fast:
        raise InvalidInputError(
            f"corpus=chat needs a fast tokenizer, which knows the place of each token in the text, and that of {name} "
            "is not; take a folder with a tokenizer.json"
        )
    return ChatTemplate(tokenizer)


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a fast tokenizer of transformers."""

    tokenizer: Any

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        untrained: Collection[int] = (),
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and whether each is a target: the answers with their marks of an end.

        Args:
            messages: the conversation.
            tools: the functions that it declares.
            arguments: more variables of the template.
            untrained: numbers of the answers that are no targets.

        Raises:
            UnreadableRowError: the template refuses the conversation, leaves out a message, or does not say where an
                answer is.

        """
        shared = {**({"tools": list(tools)} if tools else {}), **(arguments or {})}
        messages = [self._with_arguments(message) for message in messages]
        numbers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
        text, answers = self._render(messages, shared)
        if not text.isascii() and SURROGATE.search(text):
            raise UnreadableRowError("have half of a character in their text (a lone surrogate)")
        self._check_written(messages, shared, text)
        if answers is None:
            answers = [self._find(messages, number, text, shared) for number in numbers if number not in untrained]
        elif untrained:
            if len(answers) != len(numbers):
                raise UnreadableRowError("have an answer without training that the chat template does not mark alone")
            answers = [found for number, found in zip(numbers, answers, strict=True) if number not in untrained]
        is_answer = np.zeros(len(text) + 1, dtype=np.int64)
        for start, end in answers:
            is_answer[start + 1 : end + 1] = 1
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        num_before = np.cumsum(is_answer)  # characters of answers before each one
        starts, ends = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        # some tokenizers trim offsets, and spaces alone are then at no character: they count as the last of them
        is_target = num_before[ends] > num_before[np.maximum(np.minimum(starts, ends - 1), 0)]
        if not is_target.any() and len(untrained) < len(numbers):
            raise UnreadableRowError("have no answer that the tokenizer's chat template marks with {% generation %}")
        return list(encoded["input_ids"]), is_target.tolist()

    def unread(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> set[str]:
        """Return what of a conversation the template does not write, of those that it takes: it lacks their names."""
        names = {name for message in messages for name in message}
        if names & {*REASONING} and self._names & {*REASONING}:  # transformers gives each its value under all names
            names -= {*REASONING}
        found = {f"{name} of messages" for name in names - self._names}
        found |= {f"{name} of chat_template_kwargs" for name in {*(arguments or {})} - self._names}
        shared = {**(arguments or {}), "tools": list(tools or ())}
        calling = next((each for each in messages if each.get("tool_calls") and each["content"].strip()), None)
        words = "content beside tool_calls"
        try:
            if tools and "tools" not in self._written:
                self._written["tools"] = self._render(messages, shared) != self._render(messages, arguments or {})
            if calling and words not in self._written:
                other: list[Message] = [{**one, "content": PLACEHOLDER} if one is calling else one for one in messages]
                self._written[words] = PLACEHOLDER in self._render(other, shared)[0]
        except UnreadableRowError:  # the template looks at what was changed
            self._written.update({"tools": True, words: True})
        given = {"tools": bool(tools), words: calling is not None}
        return found | {name for name, is_given in given.items() if is_given and not self._written[name]}

    def _find(self, messages: Sequence[Message], number: int, text: str, shared: Mapping[str, Any]) -> tuple[int, int]:
        """Return start and end of an answer in the rendered text: from its prompt to its mark of an end, if it has one.

        It begins where the turns before it end, rendered with the prompt for it: what a template inserts before its
        words is part of it. Its words end where what follows begins, which is the same whatever the words are; calls of
        tools are words too.
        """
        calls = [_function(call) for call in messages[number].get("tool_calls", ())]
        other = {name: value for name, value in messages[number].items() if name != "tool_calls"}
        before, _ = self._render(messages[:number], shared, add_generation_prompt=True)
        try:
            changed = [*messages[:number], {**other, "content": PLACEHOLDER}, *messages[number + 1 :]]
            rendered, _ = self._render(changed, shared)
        except UnreadableRowError:
            if not calls:
                raise
            rendered = ""  # what follows the calls needs them
        shown_before, shown, after = rendered.rpartition(PLACEHOLDER)
        is_found = bool(shown) and text.endswith(after)
        if calls and not is_found:
            is_found, after = self._after_turn(messages, number, text, shared)
        start, end = len(before), len(text) - len(after)
        if not text.startswith(before):  # turns are rendered in another way once others follow
            start = self._after_prompt(messages, number, before, shown_before, shared)
            before = shown_before[:start]
        if not (is_found and start and text.startswith(before) and start < end):
            raise UnreadableRowError(
                "have an answer that the tokenizer's chat template does not show behind its prompt (a template that "
                "marks answers with {% generation %} says where they are)"
            )
        beside_words = text[start:end].replace(messages[number]["content"].strip(), "", 1)
        if not all(str(call.get("name", "")) in beside_words for call in calls):
            raise UnreadableRowError("have tool calls that the tokenizer's chat template does not write")
        marked = after.lstrip(" ")
        mark = max((mark for mark in self._added_tokens if marked.startswith(mark)), key=len, default="")
        return start, end + (len(after) - len(marked) + len(mark) if mark else 0)

    def _after_turn(
        self, messages: Sequence[Message], number: int, text: str, shared: Mapping[str, Any]
    ) -> tuple[bool, str]:
        """Return whether the turns until an answer are rendered as they are alone, and the text from its end on."""
        until, _ = self._render(messages[: number + 1], shared)
        mark = max((mark for mark in self._added_tokens if until.rstrip().endswith(mark)), key=len, default="")
        end = len(until.rstrip()) - len(mark) if mark else len(until)
        return text.startswith(until), text[end:]

    def _after_prompt(
        self, messages: Sequence[Message], number: int, before: str, shown_before: str, shared: Mapping[str, Any]
    ) -> int:
        """Return where the prompt for an answer ends in the text before its words, or 0 if it is not there."""
        if not number:
            return 0
        prompt = before.removeprefix(self._render(messages[:number], shared)[0])
        start = shown_before.rfind(prompt) if len(prompt) < len(before) else -1
        return start + len(prompt) if start >= 0 else 0

    def _check_written(self, messages: Sequence[Message], shared: Mapping[str, Any], text: str) -> None:
        """Raise UnreadableRowError if the template leaves out a message, as some do with unknown roles."""
        for number, message in enumerate(messages):
            role, content = message["role"], message["content"].strip()
            if role == ANSWERS or not content or (self._written.get(role) and content in text):
                continue
            changed = [*messages[:number], {**message, "content": PLACEHOLDER}, *messages[number + 1 :]]
            try:
                is_written = PLACEHOLDER in self._render(changed, shared)[0]
            except UnreadableRowError:  # the template reads the content
                is_written = True
            if not is_written:
                raise UnreadableRowError(
                    f"have a message of the role {role} that the tokenizer's chat template does not write", "rename it"
                )
            self._written[role] = True

    def _with_arguments(self, message: Message) -> Message:
        """Return a message whose calls have their arguments as objects, where the template would quote text."""
        calls = message.get("tool_calls")
        if not calls or not any(isinstance(_function(call).get("arguments"), str) for call in calls):
            return message
        if not self._quotes_arguments:
            return message
        return {**message, "tool_calls": [_with_object(call) for call in calls]}

    @cached_property
    def _quotes_arguments(self) -> bool:
        """Whether the template writes the arguments of a call as JSON also where they are JSON text already."""
        call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": PLACEHOLDER}}
        talk: list[Message] = [{"role": "user", "content": "?"}, {"role": ANSWERS, "content": "", "tool_calls": [call]}]
        try:
            return f'"{PLACEHOLDER}"' in self._render(talk, {})[0]
        except UnreadableRowError:
            return False

    def _render(
        self, messages: Sequence[Message], shared: Mapping[str, Any], *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Return a conversation as text, and start and end of each answer in it if the template marks them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            [text], marked = render_jinja_template(
                [list(messages)],
                chat_template=self._template,
                return_assistant_tokens_mask=MARKED_ANSWERS.search(self._template) is not None,
                add_generation_prompt=add_generation_prompt,
                **{**self.tokenizer.special_tokens_map, **shared},
            )
        except Exception as error:  # any error of the template's code
            detail, *_ = str(error).splitlines() or [type(error).__name__]
            raise UnreadableRowError("are refused by the tokenizer's chat template", detail) from error
        return text, marked[0] if marked else None

    @cached_property
    def _written(self) -> dict[str, bool]:
        """Whether the template writes the messages of a role, and other parts of conversations, as far as is known."""
        return {}

    @cached_property
    def _names(self) -> frozenset[str]:
        """All names in the template; it can read nothing that has another."""
        return frozenset({"role", "content", *re.findall(r"\w+", self._template)})

    @cached_property
    def _template(self) -> str:
        template: str = self.tokenizer.get_chat_template()
        return TODAY.sub(lambda today: repr(DAY.strftime(today["format"])), template)

    @cached_property
    def _added_tokens(self) -> list[str]:
        return list(self.tokenizer.get_added_vocab())


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a call, which has its name and arguments."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call whose arguments are an object, if they are the text of one."""
    function = _function(call)
    try:
        arguments = json.loads(function.get("arguments", ""))
    except (TypeError, ValueError):
        return call
    if not isinstance(arguments, dict):
        return call
    changed = {**function, "arguments": arguments}
    return changed if function is call else {**call, "function": changed}
