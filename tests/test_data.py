"""Corpora: deterministic sequences, the token cache, and errors for bad data."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny

from pipeline.base.contracts import Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.config.settings import CORPORA
from pipeline.data._support.sequences import IGNORED_LABEL
from pipeline.runtime.worker_pool import run_all, worker_pool

WORDS = "memory is what you have and speed is what you want from it "


@pytest.fixture
def corpus_settings(tmp_path: Path, short_documents: Path) -> dict[str, dict[str, Any]]:
    """Give settings under which each corpus is prepared without a network."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "data.jsonl").write_text(short_documents.read_text())
    return {
        "python_docs": {},
        "quick_fox": {},
        "text_files": {"text_files__path": short_documents},
        "chat": {},
        "hub": {"hub__name": str(folder)},
        "random_vectors": {"model": "encoder_stack"},
        "user_corpus": {"corpus": "experiments.examples.own:read_corpus"},
    }


def test_every_corpus_is_tested(corpus_settings: dict[str, Any]) -> None:
    assert set(corpus_settings) == set(CORPORA)


def prepare(name: str, settings: dict[str, Any], **more: Any) -> Prepared:
    return tiny(**{"corpus": name, **settings, **more}).prepare()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("sequences", ["packed", "fixed_length"])
@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_has_deterministic_sequences_and_counts(
    name: str, sequences: str, corpus_settings: dict[str, dict[str, Any]]
) -> None:
    first = prepare(name, corpus_settings[name], sequences=sequences)
    again = prepare(name, corpus_settings[name], sequences=sequences)
    assert len(first.train) >= 8
    assert len(first.held_out) >= 1
    assert first.digest == again.digest
    batch, same = first.train.batch([3, 0, 5]), again.train.batch([3, 0, 5])
    assert all(torch.equal(batch[key], same[key]) for key in batch)
    single = first.train.batch([0])
    for key, tensor in batch.items():
        assert tensor.shape[:2] == (3, 32)
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor[1:2], single[key])
    tokens, targets = first.train.count(batch)
    assert 0 < tokens <= 3 * 32
    assert targets > 0
    if "input_ids" in batch:
        assert batch["input_ids"].dtype == torch.int64
        assert int(batch["input_ids"].max()) < first.vocabulary_size
        real = batch["labels"] != IGNORED_LABEL
        assert torch.equal(batch["input_ids"][real], batch["labels"][real])
        ends = (real * torch.arange(1, 33)).amax(dim=1)
        assert tokens == (3 * 32 if sequences == "packed" else int(ends.sum()))
        assert targets == int(real[:, 1:].sum())


def test_held_out_documents_are_not_in_the_training_set(tmp_path: Path) -> None:
    file = tmp_path / "numbered.jsonl"
    file.write_text("".join(json.dumps({"text": f"{n:04d} " * 40}) + "\n" for n in range(100)))
    prepared = prepare("text_files", {"text_files__path": file}, sequences="padded")
    train = {tuple(prepared.train.batch([i])["input_ids"][0].tolist()) for i in range(len(prepared.train))}
    held_out = {tuple(prepared.held_out.batch([i])["input_ids"][0].tolist()) for i in range(len(prepared.held_out))}
    assert len(train) == 90
    assert len(held_out) == 10
    assert not train & held_out


def digest_and_rows(changes: dict[str, Any]) -> tuple[str, list[list[int]]]:
    prepared = tiny(**changes).prepare()
    return prepared.digest, prepared.train.batch([0, 7])["input_ids"].tolist()


def test_another_process_prepares_the_same_sequences() -> None:
    with worker_pool(1) as pool:
        assert [*run_all(pool, digest_and_rows, [{}])] == [(0, digest_and_rows({}))]


def test_text_is_tokenized_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path / "cache"))
    tiny().prepare()

    def refuse(*_: object) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr("pipeline.data._support.tokenizing.encode_all", refuse)
    tiny().prepare()
    with pytest.raises(AssertionError, match="tokenized again"):
        tiny(vocabulary_size=600).prepare()


def test_the_python_docs_have_80_000_tokens() -> None:
    prepared = tiny(vocabulary_size=4096, causal_lm__vocabulary_size=4096).prepare()
    assert prepared.vocabulary_size == 4096
    assert len(prepared.train) * 32 > 80_000


@pytest.mark.parametrize("suffix", [".txt", ".md", ".jsonl", ".parquet", "folder"])
def test_text_files_reads_every_format(suffix: str, tmp_path: Path) -> None:
    documents = [f"{n} {WORDS * 5}" for n in range(40)]
    if suffix == ".parquet":
        path = tmp_path / "text.parquet"
        pq.write_table(pa.table({"body": documents}), path)
    elif suffix == ".jsonl":
        path = tmp_path / "text.jsonl"
        path.write_text("\n".join(json.dumps({"body": document}) for document in documents))
    elif suffix == "folder":
        path = tmp_path
        (tmp_path / "deeper").mkdir()
        for number, document in enumerate(documents):
            (tmp_path / "deeper" / f"{number}.md").write_text(document)
        (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    else:
        path = tmp_path / f"text{suffix}"
        path.write_text("\n\n".join(documents))
    prepared = prepare("text_files", {"text_files__path": path, "text_files__field": "body"})
    assert len(prepared.train) > 8


def test_changed_text_has_another_digest(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 300)
    first = prepare("text_files", {"text_files__path": path})
    path.write_text(WORDS * 301)
    assert prepare("text_files", {"text_files__path": path}).digest != first.digest


def bad_file(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "one"}\nnot json\n', "line 2 is not .*; fix or remove it"),
        (
            "a.jsonl",
            b'{"body": "one"}\n',
            "must have the text field 'text', .*its fields: body.*; set text_files.field",
        ),
        ("a.jsonl", b'{"text": 3}\n', "must have the text field 'text'"),
        ("a.txt", b"", "has none; name another corpus or file"),
        ("a.txt", b"  \n ", "has none"),
        ("a.txt", b"\xff\xfe\x00", "must be UTF-8 text, and byte 0 is not; convert it"),
        ("a.parquet", b"nothing", "must be a Parquet file, and cannot be read"),
        ("a.pdf", b"%PDF", "reads .txt, .md, .jsonl, .*, and .* is none of them"),
        (
            "a.txt",
            b"too short",
            "the text must fill one batch: .* sequences of 32 tokens, and effective_batch_size is 8",
        ),
    ],
)
def test_bad_files_are_refused_by_name(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        prepare("text_files", {"text_files__path": bad_file(tmp_path, name, content)})


def test_a_parquet_file_without_the_column_is_refused_with_its_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(
        InvalidInputError, match="the text field 'text', and none has it .its fields: body.; set text_files.field"
    ):
        prepare("text_files", {"text_files__path": tmp_path / "a.parquet"})


def test_missing_files_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="must exist"):
        prepare("text_files", {"text_files__path": tmp_path / "absent.txt"})
    with pytest.raises(InvalidInputError, match="has none of them; name another folder"):
        prepare("text_files", {"text_files__path": tmp_path})
    with pytest.raises(InvalidInputError, match="set text_files.path"):
        prepare("text_files", {})


def test_a_hub_dataset_without_a_name_or_a_column_is_refused(short_documents: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="set hub.name"):
        prepare("hub", {})
    (tmp_path / "data.jsonl").write_text(short_documents.read_text())
    with pytest.raises(InvalidInputError, match="must have the text column 'body', and has text; set hub.field"):
        prepare("hub", {"hub__name": str(tmp_path), "hub__field": "body"})


def test_an_unwritable_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", "/proc/fitproof")
    with pytest.raises(InvalidInputError, match="cache folder must be writable, .*; set FITPROOF_CACHE"):
        tiny().prepare()


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="the model has 300 tokens, and the corpus 512; set vocabulary_size=300 or less"
    ):
        tiny(causal_lm__vocabulary_size=300).prepare()


def test_a_line_of_jsonl_ends_at_a_newline_alone(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(
        "".join(json.dumps({"text": WORDS * 9 + "\u2028 and on"}, ensure_ascii=False) + "\n" for _ in range(20))
    )
    (tmp_path / "folder.md").mkdir()
    assert len(prepare("text_files", {"text_files__path": tmp_path}).train) >= 8


@pytest.mark.parametrize("corpus", ["chat", "text_files"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"\xff\xfe", "must be UTF-8 text, and byte 0 is not; convert it"),
        ("a.parquet", b"nothing", "must be a Parquet file, and cannot be read as one"),
        ("a.jsonl", None, "must name readable files, and .* cannot be read"),
    ],
)
def test_corpora_of_files_read_rows_alike(
    name: str, content: bytes | None, message: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / name
    file.write_bytes(content or b"{}")
    if content is None:
        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InvalidInputError, match=message):
        tiny(**{"corpus": corpus, f"{corpus}__path": str(file)}).prepare()


def refuse(path: Path, mode: str) -> bytes:
    raise PermissionError(13, "Permission denied", str(path))
