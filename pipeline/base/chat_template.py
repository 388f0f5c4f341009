"""Conversations as tokens, by the chat template of a tokenizer; the answers alone are targets."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.tokenizing import SEPARATOR, load_tokenizer, train_tokenizer

Message = Mapping[str, Any]
"""A turn of a conversation: its role and its content, both text, and what else the template reads."""
ANSWERS = "assistant"
"""The role whose turns are targets."""
TURN_MARKS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of tokenizers that are trained on a corpus: ChatML, as of Qwen and SmolLM2."""
MARKED_ANSWERS = re.compile(r"{%-?\s*generation\s*-?%}")
"""The words with which a template itself marks the answers."""
TODAY = re.compile(r"""strftime_now\(\s*(["'])(?P<format>.*?)\1\s*\)""")
"""The date of the day in a template."""
DAY = date(2024, 7, 26)
"""The date that takes its place, so that data are the same on every day; Llama 3's templates have it by default."""
PLACEHOLDER = "\ufdd0"
"""A noncharacter of Unicode: no text has it."""
ENCODING = 3
"""The version of the cached tokens: another number where those of a conversation, or what is held out, change."""


class UnreadableRowError(Exception):
    """A row of a corpus that is no conversation, with the reason, and what is particular to this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def trained_chat_template(conversations: Sequence[Sequence[Message]], vocabulary_size: int) -> "ChatTemplate":
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

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and whether each is a target: the answers with their marks of an end.

        Raises:
            UnreadableRowError: the template refuses the conversation, or does not say where an answer is.

        """
        text, answers = self._render(messages)
        if answers is None:
            numbers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
            answers = [self._find(messages, number, text) for number in numbers]
        is_answer = bytearray(len(text))
        for start, end in answers:
            is_answer[start:end] = b"\1" * (end - start)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # some tokenizers trim offsets, and spaces alone are then at no character: they count as the last of them
        is_target = [any(is_answer[min(start, end - 1) : end]) for start, end in encoded["offset_mapping"]]
        if not any(is_target):
            raise UnreadableRowError("have no answer that the tokenizer's chat template marks with {% generation %}")
        return list(encoded["input_ids"]), is_target

    def _find(self, messages: Sequence[Message], number: int, text: str) -> tuple[int, int]:
        """Return start and end of an answer in the rendered text: from its prompt to its mark of an end, if it has one.

        It begins where the turns before it end, rendered with the prompt for it: what a template inserts before its
        words is part of it. Its words end where what follows begins, which is the same whatever the words are.
        """
        before, _ = self._render(messages[:number], add_generation_prompt=True)
        other = {**messages[number], "content": PLACEHOLDER}
        rendered, _ = self._render([*messages[:number], other, *messages[number + 1 :]])
        _, shown, after = rendered.rpartition(PLACEHOLDER)
        start, end = len(before), len(text) - len(after)
        if not (shown and text.startswith(before) and text.endswith(after) and start < end):
            raise UnreadableRowError(
                "have an answer that the tokenizer's chat template does not show behind its prompt (a template that "
                "marks answers with {% generation %} says where they are)"
            )
        marked = after.lstrip(" ")
        mark = max((mark for mark in self._added_tokens if marked.startswith(mark)), key=len, default="")
        return start, end + (len(after) - len(marked) + len(mark) if mark else 0)

    def _render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Return a conversation as text, and start and end of each answer in it if the template marks them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            [text], marked = render_jinja_template(
                [list(messages)],
                chat_template=self._template,
                return_assistant_tokens_mask=MARKED_ANSWERS.search(self._template) is not None,
                add_generation_prompt=add_generation_prompt,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # any error of the template's code
            raise UnreadableRowError("are refused by the tokenizer's chat template", first_line(error)) from error
        return text, marked[0] if marked else None

    @cached_property
    def _template(self) -> str:
        template: str = self.tokenizer.get_chat_template()
        return TODAY.sub(lambda today: repr(DAY.strftime(today["format"])), template)

    @cached_property
    def _added_tokens(self) -> list[str]:
        return list(self.tokenizer.get_added_vocab())
