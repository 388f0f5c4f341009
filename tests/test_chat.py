"""Conversations: what a chat template makes of them, the answers as targets, truncation, and rows that are refused."""

import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny
from project import SMALL, Project, new_store
from test_prediction import CPU
from tokenizers import processors
from trainings import check_cuts, check_peak, steps_of

from pipeline.base.errors import InvalidInputError
from pipeline.cli import main
from pipeline.data._support.chat_template import TEMPLATE, ChatTemplate, UnreadableRowError, trained_chat_template
from pipeline.data._support.sequences import IGNORED_LABEL, TokenStore
from pipeline.data._support.truncation import MOST_BINS, length_bins, truncations
from pipeline.data.chat import SHIPPED
from pipeline.jobs.notes import document_lengths, left_out, predicted_truncations
from pipeline.models.causal_lm import CausalLm
from pipeline.prediction.predict import predict
from pipeline.report.comparison import ComparisonFindings, comparison_report
from pipeline.report.findings import FILE, read_findings, to_json
from pipeline.training.metrics import Row

ROWS = [json.loads(line) for line in SHIPPED.read_text().splitlines()]
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Is it large?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And is it fast?"},
    {"role": "assistant", "content": "No, slow."},
]
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""As Llama 3: a first token, contents trimmed, no line between turns."""
THOUGHTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Qwen3: thoughts of the last answer alone, so that an answer is rendered in another way once others follow."""
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
"""The answers are marked by the template itself."""
NO_MARK = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""No token ends a turn."""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
FAILING = "{{ 'a' + 1 }}"
OTHER_PROMPT = TEMPLATE.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}")

GOOD = {"prompt": "Is it?", "completion": "Yes."}


def tokenizer_with(template: str | dict[str, str] | None) -> Any:
    tokenizer = trained_chat_template([TALK], 400).tokenizer
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.add_tokens(["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def written(folder: Path, rows: Sequence[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def folder_with(template: str | dict[str, str] | None, folder: Path) -> str:
    """Return a folder with a tiny model and a tokenizer."""
    tokenizer = tokenizer_with(template)
    tokenizer.save_pretrained(folder)
    CausalLm(num_layers=2, width=32, num_heads=2).configuration("gpt2-nano", len(tokenizer)).save_pretrained(folder)
    return str(folder)


def targets(tokenizer: Any, messages: Sequence[Any]) -> list[str]:
    """Return each run of targets as text."""
    return runs_of(tokenizer, *ChatTemplate(tokenizer).encode(messages))


def runs_of(tokenizer: Any, ids: Sequence[int], is_target: Sequence[bool]) -> list[str]:
    """Return each run of targets among token ids as text."""
    runs = groupby(zip(ids, is_target, strict=True), key=itemgetter(1))
    return [tokenizer.decode([one for one, _ in run]) for is_of_targets, run in runs if is_of_targets]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEMPLATE, ["Yes.<|im_end|>", "No, slow.<|im_end|>"]),
        (HEADERS, ["Yes.<|end|>", "No, slow.<|end|>"]),
        (THOUGHTS, ["Yes.<|end|>", "<think></think>No, slow.<|end|>"]),
        (MARKED, ["Yes.<|end|>", "No, slow.<|end|>"]),
        (NO_MARK, ["Yes.", "No, slow."]),
    ],
    ids=["ChatML", "headers", "thoughts", "marked", "no mark"],
)
def test_the_targets_are_the_answers_with_their_ends(template: str, expected: list[str]) -> None:
    tokenizer = tokenizer_with(template)
    assert [text.strip() for text in targets(tokenizer, TALK)] == expected
    whole = tokenizer.decode(ChatTemplate(tokenizer).encode(TALK)[0])
    assert whole == tokenizer.apply_chat_template(TALK, tokenize=False)


TRIMMED = HEADERS.replace("<|end|>", " <|end|>")
"""Contents trimmed, and a space before the end."""


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (THOUGHTS, "i", "<think></think>i<|end|>"),
        (THOUGHTS, "think", "<think></think>think<|end|>"),
        (THOUGHTS, "</think>", "<think></think></think><|end|>"),
        (THOUGHTS, "<|end|>", "<think></think><|end|><|end|>"),
        (TEMPLATE, "Yes.\n", "Yes.\n<|im_end|>"),
        (TEMPLATE, " Yes.\t ", " Yes.\t <|im_end|>"),
        (HEADERS, "Yes. \n", "Yes.<|end|>"),
        (TRIMMED, "\nYes.\n", "Yes. <|end|>"),
        (MARKED, " Yes. ", " Yes. <|end|>"),
    ],
)
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_answers_that_repeat_the_template_or_have_spaces(
    template: str, answer: str, expected: str, *, trim_offsets: bool
) -> None:
    tokenizer = tokenizer_with(template)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    for question in ("Is it?", answer):
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        assert targets(tokenizer, talk) == [expected]
        first = expected.removeprefix("<think></think>")
        assert targets(tokenizer, [*talk, {"role": "user", "content": "So?"}, TALK[-1]])[0] == first


def test_a_conversation_whose_answers_a_template_does_not_mark_is_refused() -> None:
    template = MARKED.replace("m.role == 'assistant'", "m.role == 'nobody'")
    with pytest.raises(UnreadableRowError, match="no answer that .* marks with {% generation %}"):
        ChatTemplate(tokenizer_with(template)).encode(TALK)


@pytest.mark.parametrize("written", ['strftime_now("%d %b %Y")', "strftime_now( '%d %b %Y' )"])
def test_the_date_of_a_template_is_the_same_on_every_day(written: str) -> None:
    tokenizer = tokenizer_with("{% set today = " + written + " %}Today: {{ today }}\n" + TEMPLATE)
    assert tokenizer.decode(ChatTemplate(tokenizer).encode(TALK)[0]).startswith("Today: 26 Jul 2024\n")


def test_blank_lines_of_an_answer_are_targets_where_offsets_are_trimmed() -> None:
    tokenizer = tokenizer_with(TEMPLATE)
    talk = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes.\n\nAnd   no."}]
    expected = ChatTemplate(tokenizer).encode(talk)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert ChatTemplate(tokenizer).encode(talk) == expected
    assert targets(tokenizer, talk) == ["Yes.\n\nAnd   no.<|im_end|>"]


def test_the_shipped_conversations_train_and_are_held_out() -> None:
    settings = {"corpus": "chat", "vocabulary_size": 4096, "sequence_length": 64, "micro_batch_size": 4}
    for sequences in ("packed", "padded"):
        experiment = tiny(**settings, sequences=sequences, num_steps=8)
        prepared = experiment.prepare()
        assert len(prepared.held_out) >= 1
        labels = prepared.train.batch(range(len(prepared.train)))["labels"]
        share = float((labels != IGNORED_LABEL).float().mean())
        assert 0.1 < share < 0.8
        records = steps_of(experiment)
        assert records[0].loss == pytest.approx(math.log(4096), rel=0.05)
        assert records[-1].loss < records[0].loss


def test_prompt_and_completion_are_the_messages_of_two_turns(tmp_path: Path) -> None:
    pairs = [row for row in ROWS if "prompt" in row]
    as_text = written(tmp_path, pairs, "text.jsonl")
    turns = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        for row in pairs
    ]
    as_messages = written(tmp_path, [{"messages": turn} for turn in turns], "messages.jsonl")
    as_turns = written(tmp_path, [{"prompt": turn[:1], "completion": turn[1:]} for turn in turns], "turns.jsonl")
    as_parquet, as_dataset = tmp_path / "rows.parquet", tmp_path / "dataset"
    pq.write_table(pa.table({"messages": turns}), as_parquet)
    as_dataset.mkdir()
    written(as_dataset, [{"messages": turn} for turn in turns], "data.jsonl")
    sources = [{"chat__path": path} for path in (as_text, as_messages, as_turns, as_parquet)]
    batches = []
    for source in [*sources, {"chat__name": str(as_dataset)}]:
        prepared = tiny(corpus="chat", sequences="padded", sequence_length=64, **source).prepare()
        batches.append(prepared.train.batch(range(len(prepared.train))))
    assert len({prepared_batch["input_ids"].shape for prepared_batch in batches}) == 1
    for other in batches[1:]:
        assert all(torch.equal(other[name], batches[0][name]) for name in other)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("sequences", ["packed", "padded"])
@pytest.mark.parametrize("model", ["gpt2-nano", "llama-nano"])
def test_losses_of_answers_do_not_depend_on_the_micro_batch_size(sequences: str, model: str) -> None:
    check_cuts(corpus="chat", model=model, sequences=sequences)


@pytest.mark.parametrize("sequences", ["packed", "padded"])
def test_the_loss_is_the_mean_over_the_answers_alone(sequences: str) -> None:
    experiment = tiny(corpus="chat", sequences=sequences, num_steps=4)
    prepared = experiment.prepare()
    module = experiment.model.build("gpt2-nano", prepared.vocabulary_size)
    batch = prepared.train.batch([0, 3, 5])
    num_targets = prepared.train.count(batch)[1]
    logits_BTV = module.module(input_ids=batch["input_ids"]).logits.log_softmax(-1)
    terms = [
        -logits_BTV[row, position - 1, batch["input_ids"][row, position]]
        for row in range(3)
        for position in range(1, 32)
        if batch["labels"][row, position] != IGNORED_LABEL
    ]
    assert len(terms) == num_targets
    assert float(module.loss(module.module, batch, num_targets).detach()) == pytest.approx(
        float(torch.stack(terms).mean().detach()), rel=1e-5
    )


@pytest.mark.parametrize("sequences", ["packed", "padded"])
def test_the_peak_with_masked_labels_is_predicted(sequences: str) -> None:
    check_peak(tiny(corpus="chat", sequences=sequences, sequence_length=64, eval_steps=0))


def test_padding_begins_after_the_last_target() -> None:
    prepared = tiny(corpus="chat", sequences="padded", sequence_length=64).prepare()
    for row in range(len(prepared.train)):
        batch = prepared.train.batch([row])
        [last] = (batch["labels"][0] != IGNORED_LABEL).nonzero()[-1].tolist()
        assert not batch["input_ids"][0, last + 1 :].any()
        assert prepared.train.count(batch)[0] == last + 1


def test_a_conversation_whose_answers_are_cut_off_is_left_out(tmp_path: Path) -> None:
    long = {"prompt": "Why is it so? " * 20, "completion": "I do not know."}
    path = written(tmp_path, [GOOD, GOOD, GOOD, long] * 25)
    prepared = tiny(corpus="chat", chat__path=path, sequences="padded").prepare()
    assert len(prepared.train) + len(prepared.held_out) == 75
    whole = tiny(corpus="chat", chat__path=path, sequences="padded", sequence_length=256).prepare()
    assert len(whole.train) + len(whole.held_out) == 100


def test_what_is_left_out_is_said_with_number_and_reason(tmp_path: Path) -> None:
    long = {"prompt": "Why is it so? " * 20, "completion": "I do not know."}
    experiment = tiny(corpus="chat", chat__path=written(tmp_path, [GOOD, GOOD, GOOD, long] * 25), sequences="padded")
    count = 90 - len(experiment.prepare().train)
    assert left_out(experiment) == (
        f"{count} of 90 documents have no target among their first 32 tokens, and are left out; a longer "
        "sequence_length keeps those that go on"
    )
    assert left_out(tiny(corpus="chat", sequences="padded", sequence_length=200)) is None
    packed = left_out(tiny(corpus="chat", sequence_length=4))
    assert packed is not None and re.fullmatch(r"\d+ of \d+ sequences of 4 tokens have no target, .*", packed)
    project = Project(tmp_path)
    new_store(tmp_path)
    chat = {**SMALL, "corpus": "chat", "chat.path": "rows.jsonl", "sequences": "padded", "effective_batch_size": "8"}
    plan = {"gpu": "t4", "space": '{"micro_batch_size": [1]}'}
    for entry, more in {"main": {"model": "gpt2-nano"}, "plan": {"model": "gpt2-nano", **plan}}.items():
        said = project.succeed(entry, {**chat, **more})
        assert f"{count} of 90 documents have no target" in said
    [table] = (tmp_path / "runs").glob("*/lengths.csv")
    own = next(line for line in csv.DictReader(table.read_text().splitlines()) if "*" in line["sequence_length"])
    assert own["left out"] == str(count)


def test_truncation_loses_the_tokens_and_targets_beyond_a_length() -> None:
    lengths = (2, 4, 6, 8)
    tokens, offsets = np.ones(sum(lengths), dtype=np.int32), np.cumsum([0, *lengths])
    is_target = np.concatenate([np.arange(length) >= length - 2 for length in lengths])
    masked, text = (truncations(TokenStore(tokens, offsets, known), [5]) for known in (is_target, None))
    assert [one.length for one in masked] == [5, 6, 8]
    assert [one.whole_percent for one in masked] == [50, 75, 100]
    assert [one.num_left_out for one in masked] == [1, 1, 0]  # that of 8 tokens, all of whose tokens are lost
    assert [one.lost_tokens_percent for one in masked] == pytest.approx([45, 40, 0])
    assert [one.lost_targets_percent for one in masked] == pytest.approx([100 * 3 / 7, 100 * 2 / 7, 0])
    assert [one.lost_tokens_percent for one in text] == pytest.approx([20, 10, 0])
    assert [one.lost_targets_percent for one in text] == pytest.approx([25, 12.5, 0])  # no first token is a target
    assert [one.num_left_out for one in text] == [0, 0, 0]


def test_packed_documents_are_truncated_and_left_out_as_padded_ones(tmp_path: Path) -> None:
    long = {"prompt": "Why is it so? " * 20, "completion": "I do not know."}
    path = written(tmp_path, [GOOD, GOOD, GOOD, long] * 25)
    padded, packed = (tiny(corpus="chat", chat__path=path, sequences=kind) for kind in ("padded", "packed_documents"))
    assert left_out(packed) == left_out(padded) is not None
    found = [[replace(one, peak_bytes=None) for one in predicted_truncations(each)] for each in (packed, padded)]
    assert found[0] == found[1] != []


@pytest.mark.parametrize("lengths", [[7], [3, 3, 90], [1, 40, 41, 80], [5, 5, 46, 100, 2000]], ids=str)
def test_every_document_is_in_one_bin_of_the_histogram(lengths: list[int]) -> None:
    store = TokenStore(np.zeros(sum(lengths), dtype=np.int32), np.cumsum([0, *lengths]))
    bins = length_bins(store)
    assert len(bins) <= MOST_BINS and len({one.end - one.start for one in bins}) == 1
    assert all(after.start == before.end + 1 for before, after in pairwise(bins))
    counts = [sum(one.start <= length <= one.end for length in lengths) for one in bins]
    assert [one.num_documents for one in bins] == counts and sum(counts) == len(lengths)


@pytest.mark.slow
def test_the_report_has_the_predicted_peak_of_each_length(tmp_path: Path) -> None:
    experiment = tiny(corpus="chat", sequences="padded", sequence_length=64, vocabulary_size=400)
    found = predicted_truncations(experiment)
    peaks = {one.length: one.peak_bytes for one in found}
    assert peaks[64] == predict(experiment, CPU).peak_bytes
    assert list(peaks) == sorted(peaks)
    within = [peak for length, peak in peaks.items() if length <= 256]
    assert within == sorted(peak for peak in within if peak)
    assert predicted_truncations(tiny(corpus="chat")) == ()
    row = Row(
        comparison="single",
        name="fp32",
        is_baseline=True,
        params={"sequence_length": 64},
        result=None,
        skipped="",
        metrics={},
    )
    lengths = document_lengths(experiment)
    findings = ComparisonFindings(
        entry="main", question="What?", rows=(row,), environment={}, truncations=found, lengths=lengths
    )
    sections = comparison_report(findings).sections
    assert "lengths" in [plot.name for section in sections for plot in section.plots]
    [frame] = [table.frame for section in sections for table in section.tables if table.name == "lengths"]
    assert [name for name in frame["sequence_length"] if "*" in name] == ["64 *"]
    assert list(frame["left out"]) == [one.num_left_out for one in found]
    (tmp_path / FILE).write_text(to_json(findings))
    assert read_findings(tmp_path) == findings


def test_if_no_answer_begins_within_a_sequence_the_corpus_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": "Why is it so? " * 20, "completion": "I do not know."}] * 20)
    with pytest.raises(InvalidInputError, match="begin within sequence_length tokens, .* set a longer"):
        tiny(corpus="chat", chat__path=path, sequences="padded").prepare()


def test_a_model_with_a_tokenizer_is_trained_on_its_template(tmp_path: Path) -> None:
    path = written(tmp_path, [{"messages": TALK}] * 20)
    values = {"model": folder_with(HEADERS, tmp_path / "model"), "corpus": "chat", "chat.path": path}
    experiment = tiny(**values, sequences="padded", sequence_length=64, causal_lm__num_layers=None)
    prepared = experiment.prepare()
    tokenizer = tokenizer_with(HEADERS)
    assert prepared.vocabulary_size == len(tokenizer)
    batch = prepared.train.batch([0])
    assert tokenizer.decode(batch["input_ids"][0, : prepared.train.count(batch)[0]]) == (
        "<s><|system|>\nBe short.<|end|><|user|>\nIs it large?<|end|><|assistant|>\nYes.<|end|>"
        "<|user|>\nAnd is it fast?<|end|><|assistant|>\nNo, slow.<|end|>"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(THOUGHTS)
    assert experiment.prepare().digest != prepared.digest


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "needs a tokenizer with a chat template, and that of .* has none; take the model's instruction-tuned"),
        (NO_SYSTEM, "20 of 20 are not: 20 are refused by the tokenizer's chat template, line 1 first .no system role."),
        (FAILING, "20 are refused by the tokenizer's chat template, line 1 first .can only concatenate str"),
        (OTHER_PROMPT, "20 have an answer that the tokenizer's chat template does not show .*; fix or remove them"),
    ],
    ids=["none", "no system role", "an error", "another prompt"],
)
def test_a_template_that_does_not_do_is_refused(template: str | None, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, [{"messages": TALK}] * 20)
    with pytest.raises(InvalidInputError, match=message):
        tiny(model=folder_with(template, tmp_path / "model"), corpus="chat", chat__path=path).prepare()


def test_one_of_several_templates_must_have_the_name_default(tmp_path: Path) -> None:
    path = written(tmp_path, [{"messages": TALK}] * 20)
    chat: dict[str, Any] = {"corpus": "chat", "chat__path": path, "causal_lm__num_layers": None}
    named = {"default": HEADERS, "other": TEMPLATE}
    tiny(**chat, model=folder_with(named, tmp_path / "with")).prepare()
    del named["default"]
    with pytest.raises(InvalidInputError, match="takes the chat template with the name default, and .* has other; "):
        tiny(**chat, model=folder_with(named, tmp_path / "without")).prepare()


UNREADABLE: list[tuple[Any, str]] = [
    ("not json", "1 are not JSON, line 2 first"),
    ("[3]", "1 are neither objects with names nor lists of messages, line 2 first .list"),
    ({"text": "a"}, "1 have neither messages nor .*its fields: text"),
    ({"prompt": "a"}, "1 have neither messages nor .*its fields: prompt"),
    ({"prompt": "a", "completion": 3}, "1 have a message whose role or content is not text"),
    ({"messages": "a"}, "1 have messages that are not a list of objects with role and content"),
    ({"messages": [{"role": "user"}]}, "1 have no answer: a message of the role assistant"),
    ({"messages": [{"role": "user", "content": 3}]}, "1 have a message whose role or content is not text, .*int"),
    ({"messages": TALK[:2]}, "1 have no answer: a message of the role assistant"),
    ({"prompt": "a", "completion": " "}, "1 have no answer"),
    ({"messages": TALK[2:]}, "1 begin with an answer"),
    ({"messages": TALK, "functions": 5}, "1 have tools that are not a list of objects"),
    ({"messages": TALK, "functions": "none"}, "1 have tools that are not a list of objects, .*str"),
]


@pytest.mark.parametrize(("row", "message"), UNREADABLE, ids=[reason for _, reason in UNREADABLE])
def test_unreadable_rows_are_counted_with_reason_and_place(row: Any, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, [GOOD, row, GOOD])
    with pytest.raises(InvalidInputError, match=f"1 of 3 are not: {message}.*; fix or remove them"):
        tiny(corpus="chat", chat__path=path).prepare()


def test_a_refusal_is_short_whatever_the_rows_have(tmp_path: Path) -> None:
    rows = [{f"field {row} {number}": 1 for number in range(100)} for row in range(300)]
    with pytest.raises(InvalidInputError, match="300 have neither .*its fields: field 0 0, field 0 1") as raised:
        tiny(corpus="chat", chat__path=written(tmp_path, rows)).prepare()
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "name",
    ["special_tokens_map.json", "added_tokens.json", "merges.txt", "spiece.model", "additional_chat_templates/a.jinja"],
)
@pytest.mark.parametrize("corpus", ["chat", "text_files"])
def test_other_files_of_a_tokenizer_are_another_digest(
    corpus: str, name: str, short_documents: Path, tmp_path: Path
) -> None:
    model = folder_with(HEADERS, tmp_path / "model")
    source = {"chat": {}, "text_files": {"text_files__path": short_documents}}[corpus]
    experiment = tiny(model=model, corpus=corpus, **source, causal_lm__num_layers=None)
    before = experiment.read_corpus().digest
    file = tmp_path / "model" / name
    file.parent.mkdir(exist_ok=True)
    for content in ("{}", "{} "):
        file.write_text(content)
        after = experiment.read_corpus().digest
        assert after != before
        before = after
    (tmp_path / "model" / "other.safetensors").write_bytes(b"weights")
    assert experiment.read_corpus().digest == before


def test_reasons_are_counted_apart(tmp_path: Path) -> None:
    path = written(tmp_path, [GOOD, "no", {"a": 1}, "no"])
    with pytest.raises(
        InvalidInputError,
        match="3 of 4 are not: 2 are not JSON, line 2 first .Expecting value.; 1 have neither .*, line 3",
    ):
        tiny(corpus="chat", chat__path=path).prepare()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--chat.path", "absent.jsonl"],
            "absent.jsonl must be a readable file or folder (No such file or directory); check the path in chat.path",
        ),
        (["--chat.path", "rows.pdf"], "and rows.pdf is none of them; rename or convert it"),
        (["--chat.path", "a.jsonl", "--chat.name", "b"], "are two; set one of them"),
        (
            ["--chat.path", "a.jsonl", "--chat.split", "test"],
            "and chat.name is none (chat.config is none, chat.split test)",
        ),
    ],
)
def test_a_source_that_is_none_ends_the_command(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.pdf", "a.jsonl"):
        (tmp_path / name).touch()
    assert main(["main", "--model", "gpt2-nano", "--device", "cpu", "--corpus", "chat", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_of_few_conversations_one_is_held_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"Is it {number}?", "completion": "Yes."} for number in range(3)]
    prepared = tiny(
        corpus="chat",
        chat__path=written(tmp_path, rows),
        sequences="padded",
        effective_batch_size=2,
        micro_batch_size=1,
    ).prepare()
    assert (len(prepared.train), len(prepared.held_out)) == (2, 1)


def test_files_without_conversations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="has none; name another file or dataset"):
        tiny(corpus="chat", chat__path=written(tmp_path, [])).prepare()
    (tmp_path / "a.parquet").write_bytes(b"nothing")
    with pytest.raises(InvalidInputError, match="must be a Parquet file"):
        tiny(corpus="chat", chat__path=tmp_path / "a.parquet").prepare()
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match="must be UTF-8 text, and byte 0 is not"):
        tiny(corpus="chat", chat__path=tmp_path / "a.jsonl").prepare()
