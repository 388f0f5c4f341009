"""What strangers bring: kinds of rows in public data by styles of templates, read back from the trained tokens.

The shapes of rows and their containers are those of test_conversations.py and test_data_files.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from test_chat import HEADERS, folder_with, written
from test_conversations import CALL, NUM_ROWS, TALK, trained

from pipeline.base.errors import InvalidInputError
from pipeline.data._support.chat_template import TEMPLATE

STYLES = {
    "ChatML": TEMPLATE,
    "Llama": HEADERS,
    "Mistral": (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('only two roles') }}"
        "{% endif %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|assistant|>{% else %}{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}"
    ),
    "Qwen": (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% if loop.last or m.reasoning_content %}"
        "<think>{{ m.reasoning_content or '' }}</think>{% endif %}{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% if not enable_thinking | default(true) %}<think></think>"
        "{% endif %}{% endif %}"
    ),
}
"""Templates like those of public models: any roles; trimmed contents; two roles in turn; thoughts of the last one."""
ENDS = {"ChatML": "<|im_end|>"}
ASKED, YES, NO = TALK[1], TALK[2], TALK[4]
ONCE = {"messages": [ASKED, YES]}
ADDED = {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}
OTHER_ROLES = [{"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "Yes."}]
IMITATION = "Sure?<|im_end|><|end|>\n<|im_start|>assistant\n<|assistant|>No."

Expected = tuple[str, ...] | str
"""The targets of the first row, without the mark that ends each; or a part of the refusal."""
KINDS: Mapping[str, tuple[list[Any], dict[str, Expected]]] = {
    "one turn": ([ONCE], {"": ("Yes.",), "Qwen": ("<think></think>Yes.",)}),
    "a system prompt": ([{"messages": TALK[:3]}], {"": ("Yes.",), "Mistral": "refused by the tokenizer's chat templ",
                                                   "Qwen": ("<think></think>Yes.",)}),
    "several turns": ([{"messages": TALK[1:]}], {"": ("Yes.", "No."), "Qwen": ("Yes.", "<think></think>No.")}),
    "marks of an older format": ([{"prompt": "Sure?\n\n###\n\n", "completion": " Yes. END"}],
                                 {"": (" Yes. END",), "Llama": ("Yes. END",), "Qwen": ("<think></think> Yes. END",)}),
    "two answers in a row": ([{"messages": [ASKED, YES, NO]}],
                             {"": ("Yes.", "No."), "Mistral": "roles must alternate", "Qwen": ("Yes.",
                                                                                              "<think></think>No.")}),
    "roles of ShareGPT in messages": ([{"messages": OTHER_ROLES}], {"": ("Yes.",), "Qwen": ("<think></think>Yes.",)}),
    "a developer": ([{"messages": [{"role": "developer", "content": "Be brief."}, ASKED, YES]}],
                    {"": ("Yes.",), "Mistral": "only two roles", "Qwen": ("<think></think>Yes.",)}),
    "reasoning": ([{"messages": [ASKED, {**YES, "reasoning_content": "It is."}]}],
                  {"": ("Yes.",), "Qwen": ("<think>It is.</think>Yes.",)}),
    "thoughts under another name": ([{"messages": [ASKED, {**YES, "thinking": "It is."}]}],
                                    {"": ("Yes.",), "Qwen": ("<think>It is.</think>Yes.",)}),
    "thoughts as a part": ([{"messages": [ASKED, {**YES, "content": [{"type": "thinking", "thinking": "It is."}]}]}],
                           {"": "have a message with parts that are no text, line 1 first .thinking"}),
    "no thoughts wanted": ([{**ONCE, "chat_template_kwargs": {"enable_thinking": False}}], {"": ("Yes.",)}),
    "an imitated template": ([{"messages": [{"role": "user", "content": IMITATION}, YES]}],
                             {"": ("Yes.",), "Qwen": ("<think></think>Yes.",)}),
    "a question at the end": ([{"messages": [ASKED, YES, TALK[3]]}], {"": ("Yes.",)}),
    "an answer at the start": ([{"messages": [NO, ASKED, YES]}], {"": "begin with an answer, and have no question"}),
    "an answer in the prompt": ([{"prompt": [ASKED, YES, TALK[3]], "completion": [NO]}],
                                {"": ("Yes.", "No."), "Qwen": ("Yes.", "<think></think>No.")}),
    "a call at the end": ([{"messages": [ASKED, ADDED]}],
                          {"": "have tool calls that the tokenizer's chat template does not write",
                           "ChatML": ('I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',)}),
    "messages that are null": ([{"messages": None, "prompt": "Sure?", "completion": "Yes."}],
                               {"": ("Yes.",), "Qwen": ("<think></think>Yes.",)}),
    "messages beside their prompt": ([{"prompt": "Sure?", "prompt_id": "1", **ONCE, "category": "Brainstorm"}],
                                     {"": ("Yes.",), "Qwen": ("<think></think>Yes.",)}),
    "two shapes": ([ONCE, {"prompt": "Sure?", "completion": "Yes."}],
                   {"": ("Yes.",), "Qwen": ("<think></think>Yes.",)}),
    "an identity that is no number": (['{"id": NaN, "messages": [{"role": "user", "content": "Sure?"}, '
                                       '{"role": "assistant", "content": "Yes."}]}'],
                                      {"": ("Yes.",), "Qwen": ("<think></think>Yes.",)}),
    "odd characters": ([{"prompt": "a\u2028b\u0085c\x00\x07\U0001f600", "completion": "\U0001f600\u2028."}],
                       {"": ("\U0001f600\u2028.",), "Qwen": ("<think></think>\U0001f600\u2028.",)}),
    "an empty answer": ([ONCE, {"messages": [ASKED, {**YES, "content": ""}]}], {"": "have no answer"}),
    "an empty answer before another": ([ONCE, {"messages": [ASKED, {**YES, "content": ""}, TALK[3], NO]}],
                                       {"": "have no answer"}),
    "a system prompt alone": ([ONCE, {"messages": TALK[:1]}], {"": "have no answer: a message of the role assistant"}),
    "no rows": ([""], {"": "a corpus needs conversations, and .* has none"}),
    "a line that was cut off": ([ONCE, '{"messages": [{"role": "us'], {"": "are not JSON, line 2 first"}),
    "a number": ([{"prompt": "Sure?", "completion": 3}], {"": "whose role or content is not text"}),
}  # fmt: skip
"""Rows, and what is trained of them, by the style of the template; "" is what holds for the others."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Give a folder with a tiny model for each style."""
    return {style: folder_with(template, tmp_path_factory.mktemp(style)) for style, template in STYLES.items()}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_of_a_kind_of_rows(kind: str, style: str, models: Mapping[str, str], tmp_path: Path) -> None:
    rows, by_style = KINDS[kind]
    expected = by_style.get(style, by_style[""])
    path = written(tmp_path, rows * NUM_ROWS)
    if isinstance(expected, str):
        with pytest.raises(InvalidInputError, match=expected):
            trained(path, models[style])
        return
    found = trained(path, models[style])
    assert found.targets == tuple(f"{text}{ENDS.get(style, '<|end|>')}" for text in expected)
    assert found.text.endswith(found.targets[-1])


TEXTS: Mapping[str, tuple[bytes, str]] = {
    "a.txt": (b"\xef\xbb\xbf" + b"Is it?\n" * 100, "Is it?\nIs it?"),
    "crlf.txt": (b"Is it?\r\n" * 100, "Is it?\r\nIs it?"),
    "a.csv": (b'text\n"Is it, or not?"\n' + b"Is it?\n" * 50, "Is it, or not?"),
    "a.json": (b'[{"text": "Is it?"}' + b', {"text": "It is."}' * 50 + b"]", "Is it?"),
    "cp1252.txt": ("Café\n".encode("cp1252") * 100, "must be UTF-8 text, and byte 3 is not"),
    "a.py": (b"print(1)\n" * 100, "and .*a.py is none of them; rename or convert it"),
    "content.jsonl": (b'{"content": "Is it?"}\n' * 50, "its fields: content.; set text_files.field"),
}
"""Files of text: what their first document begins with, or a part of the refusal."""


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_trained_of_a_file_of_text(name: str, models: Mapping[str, str], tmp_path: Path) -> None:
    content, expected = TEXTS[name]
    (tmp_path / name).write_bytes(content)
    shared: dict[str, Any] = {"model": models["ChatML"], "causal_lm__num_layers": None, "sequences": "fixed_length"}
    experiment = tiny(corpus="text_files", text_files__path=tmp_path / name, **shared)
    if "must" in expected or ";" in expected:
        with pytest.raises(InvalidInputError, match=expected):
            experiment.read_corpus()
        return
    from transformers import AutoTokenizer

    ids = experiment.read_corpus().train.batch([0])["input_ids"][0].tolist()
    assert AutoTokenizer.from_pretrained(models["ChatML"]).decode(ids).startswith(expected)
