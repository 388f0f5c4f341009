"""The shapes of conversations in public data: what of a row is trained, what is refused, and what is said."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from project import SMALL, Project, new_store
from test_chat import HEADERS, folder_with, runs_of, tokenizer_with, written

from pipeline.base.contracts import Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.data._support.chat_template import TEMPLATE, UnreadableRowError
from pipeline.data._support.conversations import read_conversation
from pipeline.data._support.shapes import Reading
from pipeline.export.write import export_files

NUM_ROWS = 6
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it large?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Sure?\nReally?"},
    {"role": "assistant", "content": "No."},
]
SYSTEM = {"system": "Be brief."}
SHARED = {**SYSTEM, "history": [["Is it large?", "Yes."]]}
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}[one["role"]], "value": one["content"]} for one in TALK[1:]]
NAMED = {"chat__fields__prompt": "ask", "chat__fields__completion": "say", "chat__fields__history": "before"}
SHAPES: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "messages": ({"messages": TALK}, {}),
    "a list of messages": (TALK, {}),
    "names in capitals": ({"messages": [{**one, "role": one["role"].title()} for one in TALK]}, {}),
    "messages as JSON": ({"messages": json.dumps(TALK)}, {}),
    "lists of fields": ({"messages": {name: [one[name] for one in TALK] for name in ("role", "content")}}, {}),
    "parts of text": ({"messages": [{**one, "content": [{"type": "text", "text": one["content"]}]}
                                    for one in TALK]}, {}),
    "Gemini": ({"contents": [{"role": one["role"].replace("assistant", "model"), "parts": [{"text": one["content"]}]}
                             for one in TALK[1:]], "systemInstruction": {"parts": [{"text": "Be brief."}]}}, {}),
    "conversations": ({"conversations": TALK}, {}),
    "ShareGPT": ({"conversations": SHAREGPT, **SYSTEM, "tools": "[]"}, {}),
    "two in a turn": ({"conversation": [{"human": "Is it large?", "assistant": "Yes."},
                                        {"human": "Sure?\nReally?", "assistant": "No."}], **SYSTEM}, {}),
    "Alpaca": ({"instruction": "Sure?", "input": "Really?", "output": "No.", **SHARED}, {}),
    "history as JSON": ({"instruction": "Sure?\nReally?", "input": "", "output": "No.", **SYSTEM,
                         "history": json.dumps(SHARED["history"])}, {}),
    "Dolly": ({"instruction": "Sure?", "context": "Really?", "response": "No.", "category": "a", **SHARED}, {}),
    "prompt and completion": ({"prompt": "Sure?\nReally?", "completion": "No.", **SHARED}, {}),
    "prompt with context": ({"prompt": "Sure?", "context": "Really?", "completion": "No.", **SHARED}, {}),
    "lists of messages": ({"prompt": TALK[:4], "completion": TALK[4:], "messages": None}, {}),
    "question and answer": ({"question": "Sure?\nReally?", "answer": "No.", **SHARED}, {}),
    "OpenOrca": ({"system_prompt": "Be brief.", "question": "Sure?\nReally?", "response": "No.",
                  "history": SHARED["history"]}, {}),
    "chosen": ({"prompt": "Sure?\nReally?", "chosen": "No.", "rejected": "Yes.", **SHARED},
               {"chat__train_chosen": True}),
    "chosen messages": ({"chosen": TALK, "rejected": [*TALK[:4], TALK[2]]}, {"chat__train_chosen": True}),
    "chosen of ShareGPT": ({"conversations": SHAREGPT[:3], "chosen": SHAREGPT[3], "rejected": SHAREGPT[1], **SYSTEM},
                           {"chat__train_chosen": True}),
    "named fields": ({"ask": "Sure?\nReally?", "say": "No.", "before": SHARED["history"], "output": "?", **SYSTEM},
                     NAMED),
    "named role and content": ({"conversations": [{"who": one["role"], "said": one["content"]} for one in TALK]},
                               {"chat__fields__role": "who", "chat__fields__content": "said"}),
    "named turns": ({"log": [{"who": one["role"], "said": one["content"]} for one in TALK], "messages": "?"},
                    {"chat__fields__messages": "log", "chat__fields__role": "who", "chat__fields__content": "said"}),
}  # fmt: skip
CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WRONG = {"role": "assistant", "content": "WRONG"}


@dataclass(frozen=True)
class Trained:
    """What is trained of the first document of a corpus."""

    text: str
    targets: tuple[str, ...]
    notes: tuple[str, ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give a folder with a tiny model whose template writes tools."""
    return folder_with(TEMPLATE, tmp_path_factory.mktemp("model"))


def read(path: Path, model: str, **settings: Any) -> Prepared:
    chat = {"corpus": "chat", "sequences": "padded", "sequence_length": 256, "causal_lm__num_layers": None}
    return tiny(model=model, chat__path=path, **chat, **settings).read_corpus()


def trained(path: Path, model: str, **settings: Any) -> Trained:
    """Return the text and the runs of targets of the first document, read back from the tokens that are trained."""
    prepared = read(path, model, **settings)
    batch = prepared.train.batch([0])
    tokenizer = tokenizer_with(TEMPLATE)
    end = prepared.train.count(batch)[0]
    ids, is_target = batch["input_ids"][0, :end].tolist(), (batch["labels"][0, :end] != -100).tolist()
    return Trained(tokenizer.decode(ids), tuple(runs_of(tokenizer, ids, is_target)), prepared.notes)


def of_rows(row: Any, folder: Path, model: str, **settings: Any) -> Trained:
    return trained(written(folder, [row] * NUM_ROWS), model, **settings)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_trained_as_its_messages(shape: str, model: str, tmp_path: Path) -> None:
    row, settings = SHAPES[shape]
    found = of_rows(row, tmp_path, model, **settings)
    assert found.targets == ("Yes.<|im_end|>", "No.<|im_end|>")
    assert found.text == tokenizer_with(TEMPLATE).apply_chat_template(TALK, tokenize=False).rstrip("\n")


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": "I add."}], ids=str)
def test_tools_reach_the_template_and_calls_are_targets(content: dict[str, Any], model: str, tmp_path: Path) -> None:
    calling = [
        TALK[1],
        {"role": "assistant", **content, "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        TALK[4],
    ]
    found = of_rows({"messages": calling, "tools": [TOOL]}, tmp_path, model)
    words = content.get("content") or ""
    assert found.targets == (f"{words}<tool_call>{json.dumps(CALL['function'])}</tool_call><|im_end|>", "No.<|im_end|>")
    assert found.text.startswith(f"<|im_start|>tools\n{json.dumps(TOOL)}\n<|im_end|>")
    as_text = {**CALL, "function": {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}}
    others = [{**one, "tool_calls": [as_text]} if "tool_calls" in one else one for one in calling]
    assert of_rows({"messages": others, "tools": json.dumps([TOOL])}, tmp_path, model).text == found.text


def test_older_and_sharegpt_calls_are_tool_calls(model: str, tmp_path: Path) -> None:
    function = {"name": "add", "arguments": {"a": 1}}
    turns = [("human", "Sure?"), ("function_call", json.dumps(function)), ("observation", "2"), ("gpt", "Yes.")]
    sharegpt = {"conversations": [{"from": role, "value": text} for role, text in turns], "tools": json.dumps([TOOL])}
    older = [
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "add", "content": "2"},
        {"role": "assistant", "content": "Yes."},
    ]
    first = of_rows(sharegpt, tmp_path, model)
    assert first.targets[0] == f"<tool_call>{json.dumps(function)}</tool_call><|im_end|>"
    assert of_rows({"messages": older, "functions": [TOOL["function"]]}, tmp_path, model).text == first.text


def test_what_parquet_fills_in_is_removed(model: str, tmp_path: Path) -> None:
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "ask", "arguments": {"b": "?"}}]
    rows = [
        {"messages": [TALK[1], {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}]}
        for call in calls * NUM_ROWS
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = trained(tmp_path / "rows.parquet", model)
    assert found.targets == trained(written(tmp_path, rows), model).targets and "null" not in found.text


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_tools_and_arguments_of_a_template_are_those_that_trl_trains(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if think %}{{ think }}{% endif %}{% for m in messages %}"
        "<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function | tojson }}{% endfor %}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}"
    )
    folder = folder_with(template, tmp_path / "marked")
    calling = [TALK[1], {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
    row = {"messages": [*calling, TALK[4]], "tools": [TOOL], "chat_template_kwargs": {"think": "hard"}}
    found = read(written(tmp_path, [row] * NUM_ROWS), folder).train.batch([0])
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_config(tiny(model=folder).model.configuration(folder, 1)),  # type: ignore[attr-defined]
        SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, assistant_only_loss=True, max_length=None),
        train_dataset=Dataset.from_list([row]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    theirs = trainer.train_dataset[0]
    count = len(theirs["input_ids"])
    assert found["input_ids"][0, :count].tolist() == list(theirs["input_ids"])
    assert (
        found["labels"][0, :count].tolist() == list(theirs["labels"]) and sum(x != -100 for x in theirs["labels"]) > 0
    )


@pytest.mark.parametrize(
    "mark",
    [{"weight": 0}, {"train": False}, {"training": False, "loss": False}, {"train": False, "weight": 1}],
    ids=str,
)
def test_marked_answers_are_no_targets(mark: dict[str, Any], model: str, tmp_path: Path) -> None:
    row = {"messages": [TALK[1], {**WRONG, **mark}, TALK[3], {**TALK[4], "weight": 1}]}
    found = of_rows(row, tmp_path, model)
    assert found.targets == ("No.<|im_end|>",) and "WRONG" in found.text
    with pytest.raises(InvalidInputError, match="some answer must be trained, and those of .* are all marked"):
        of_rows({"messages": row["messages"][:2]}, tmp_path, model)


REFUSED: Sequence[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "completion": "b", "label": False}, "marked as not to be trained, line 1 first .label: false"),
    ({"instruction": "a", "output": "b", "kto_tag": False}, "marked as not to be trained, line 1 first .kto_tag"),
    ({"prompt": "a", "completion": "b", "images": ["1.png"]}, "have images, video or sound"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, TALK[4]]}, "parts that are no text, .*image"),
    ({"contents": [{"role": "user", "parts": [{"fileData": {}}]}, TALK[4]]}, "parts that are no text, .*fileData"),
    ({"messages": [TALK[1], {**TALK[4], "weight": 0.5}]}, "a mark that is neither 0 nor 1, line 1 first .weight"),
    ({"messages": [{**TALK[1], "train": True}, TALK[4]]}, "to be trained, and is none of the assistant"),
    ({"messages": [TALK[1], {**TALK[4], "train_detail": [{}]}]}, "only parts are to be trained"),
    ({"messages": [TALK[1], {**TALK[4], "mask": True}]}, "some tools train and others do not; write train or weight"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, r"preference pairs.*--chat.path .* --chat.train_chosen true"),
    ({"text": "a"}, "they are documents.*fitproof main --corpus text_files --text_files.path .*rows.jsonl"),
    ({"ask": "a", "say": "b"}, "its fields: ask, say.*--chat.fields.prompt NAME --chat.fields.completion NAME"),
    ({"log": SHAREGPT}, "its fields: log.*--chat.fields.messages log"),
    (
        {"messages": [{"who": "user", "said": "a"}]},
        "without a role.*--chat.fields.role NAME --chat.fields.content NAME",
    ),
    ({"input_ids": [1], "labels": [1]}, "are token ids already"),
    ({"segments": [{"label": True, "text": "a"}]}, "are segments of text"),
    ({"message_id": "1", "parent_id": None, "text": "a", "role": "prompter"}, "single messages of a tree .OASST"),
    ({"prompt": "a", "completion": "\ud83d"}, r"half of a character .* line 1 first"),
    ({"prompt": "a", "completion": 3}, "is not text, line 1 first .int"),
    ({"messages": [TALK[1], {"role": "assistant", "tool_calls": "add"}]}, "tool calls that are not a list of objects"),
]


@pytest.mark.parametrize(("row", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_trained_is_refused_with_its_reason(
    row: dict[str, Any], message: str, model: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        of_rows(row, tmp_path, model)


FIELDS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "system",
    "history",
    "tools",
    "functions",
    "label",
)
TURN = ("role", "from", "content", "value", "tool_calls", "function_call", "weight", "train_detail", "type", "text")
WORDS = ("user", "gpt", "function_call", "[]", "{}", '[{"role": "user"}]', "\ud83d", "text", "")
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TURN), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5) | VALUES, st.booleans())
def test_whatever_a_row_is_it_is_read_or_refused(row: Any, train_chosen: bool) -> None:
    with contextlib.suppress(UnreadableRowError):
        read_conversation(row, Reading(answer="chosen" if train_chosen else None))


def test_what_a_template_does_not_write_is_refused_or_said(tmp_path: Path) -> None:
    template = HEADERS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'developer' %}")
    folder = folder_with(template, tmp_path / "model")
    with pytest.raises(InvalidInputError, match="role developer that the tokenizer's chat template does not write"):
        of_rows({"messages": [{"role": "developer", "content": "Be brief."}, *TALK[1:]]}, tmp_path, folder)
    with pytest.raises(InvalidInputError, match="have tool calls that the tokenizer's chat template does not write"):
        of_rows({"messages": [TALK[1], {**TALK[2], "tool_calls": [CALL]}]}, tmp_path, folder)
    answer = {**TALK[2], "name": "a", "reasoning": "It is."}
    row = {"messages": [TALK[1], answer], "tools": [TOOL], "chat_template_kwargs": {"think": True}, "id": 1}
    [note] = read(written(tmp_path, [row] * NUM_ROWS), folder).notes
    unread = {"tools", "id", "think of chat_template_kwargs", "name of messages", "reasoning of messages"}
    assert {*note.partition("not read: ")[2].split(", ")} == unread


def test_unreadable_rows_are_left_out_if_that_is_set(model: str, tmp_path: Path) -> None:
    rows = [{"messages": TALK}] * 20 + [{"messages": TALK[:2]}, "no JSON"]
    path = written(tmp_path, rows)
    with pytest.raises(InvalidInputError, match="2 of 22 are not: .*leave them out by chat.unreadable_rows=leave_out"):
        read(path, model)
    prepared = read(path, model, chat__unreadable_rows="leave_out")
    assert len(prepared.train) + len(prepared.held_out) == 20
    assert prepared.notes[-1].startswith("2 rows are left out: 1 have no answer")


def test_a_command_says_what_it_read_and_exports_train_on_that(tmp_path: Path) -> None:
    row = {"instruction": "Is it?", "output": "Yes.", "source": "me", "score": 1}
    (tmp_path / "rows.json").write_text(json.dumps([row] * 40, indent=1))
    values = {**SMALL, "corpus": "chat", "chat.path": "rows.json", "sequences": "padded", "effective_batch_size": "8"}
    new_store(tmp_path)
    said = Project(tmp_path).succeed("main", {**values, "model": "gpt2-nano"})
    assert "rows.json: 40 rows as Alpaca; fields that were not read: s" in said
    folder = folder_with(TEMPLATE, tmp_path / "model")
    files = export_files(tiny(model=folder, corpus="chat", chat__path=str(tmp_path / "rows.json"), sequences="padded"))
    assert "TOKENS = " in files["trl_sft.py"] and "CONVERSATIONS" not in files["trl_sft.py"]
    assert "rows of the corpus have another shape" in " ".join(files["axolotl.yaml"].replace("#", "").split())
