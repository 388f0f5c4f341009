"""Conversations as tokens, by the chat template of a tokenizer; the answers alone are targets."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.base.tokenizing import SEPARATOR, train_tokenizer

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


class UnreadableRowError(Exception):
    """A row of a corpus that is no conversation, with the reason."""


def trained_chat_tokenizer(conversations: Sequence[Sequence[Message]], vocabulary_size: int) -> Any:
    """Return transformers' tokenizer with TEMPLATE, trained on what the messages say."""
    from transformers import PreTrainedTokenizerFast

    texts = (f"{message['role']}\n{message['content']}" for messages in conversations for message in messages)
    trained = train_tokenizer(texts, vocabulary_size, (SEPARATOR, *TURN_MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=TURN_MARKS[1], chat_template=TEMPLATE)


def encode(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and whether each is a target: the answers with their marks of an end.

    Raises:
        UnreadableRowError: the template refuses the conversation, or does not say where an answer is.

    """
    if MARKED_ANSWERS.search(tokenizer.get_chat_template()):
        marked = _render(tokenizer, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(marked["input_ids"]), [bool(each) for each in marked["assistant_masks"]]
    text = _render(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    is_answer = np.zeros(len(text) + 1, dtype=np.int64)
    for start, end in _answers(tokenizer, messages, text):
        is_answer[start + 1 : end + 1] = 1
    num_before = is_answer.cumsum()  # characters of answers before each character
    starts_N, ends_N = np.array(encoded["offset_mapping"]).T
    starts_N = np.minimum(starts_N, np.maximum(ends_N - 1, 0))  # some tokenizers trim offsets: spaces alone have none
    return list(encoded["input_ids"]), list(num_before[ends_N] > num_before[starts_N])


def _answers(tokenizer: Any, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
    """Return start and end of each answer in the rendered text: from its prompt to its mark of an end, if it has one.

    A template may render a turn in another way once others follow it, so the turns before an answer are rendered with
    the prompt for it, and the answer's own words are found behind them.
    """
    marks = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    end_of_turn = re.compile(f" *(?:{'|'.join(map(re.escape, marks))})" if marks else "")
    found = []
    for number, message in enumerate(messages):
        if message["role"] != ANSWERS:
            continue
        before = _render(tokenizer, messages[:number], add_generation_prompt=True)
        words = message["content"].strip()
        at = text.find(words, len(before)) if text.startswith(before) else -1
        if at < 0:
            raise UnreadableRowError(
                "have an answer that the tokenizer's chat template does not show behind its prompt (a template that "
                "marks answers with {% generation %} says where they are)"
            )
        end = at + len(words)
        mark = end_of_turn.match(text, end)
        found.append((len(before), mark.end() if mark else end))
    return found


def _render(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(list(messages), **{"tokenize": False, **options})
    except TemplateError as error:
        raise UnreadableRowError(f"are refused by the tokenizer's chat template ({error})") from error
