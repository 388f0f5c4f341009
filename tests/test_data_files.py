"""The containers of data: every file with the same rows is the same corpus, and folders are read as datasets."""

import bz2
import csv
import gzip
import json
import lzma
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, tiny
from hypothesis import given
from hypothesis import strategies as st

from pipeline.base.errors import InvalidInputError
from pipeline.data._support import token_processes
from pipeline.data._support.packing import best_fit
from pipeline.data._support.rows import _values
from pipeline.data._support.sequences import PaddedSequences

ROWS = [
    {"prompt": f'Is {number}\u2028 it, or "is" it {number}?', "completion": f"Yes,\nit is {number}."}
    for number in range(30)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def as_csv(path: Path, separator: str = ",") -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"], delimiter=separator)
        writer.writeheader()
        writer.writerows(ROWS)


def as_arrow(path: Path, new: Callable[..., Any] = pa.ipc.new_stream) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table)


def as_shards(folder: Path) -> None:
    folder.mkdir()
    for number in range(3):
        (folder / f"part-{number}.jsonl").write_bytes(b"".join(LINES.splitlines(keepends=True)[number * 10 :][:10]))


def as_repository(folder: Path) -> None:
    """Write a dataset's repository with two splits, and what lies beside them."""
    (folder / "data").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "data" / "train-00000-of-00001.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[:3]), folder / "data" / "test-00000-of-00001.parquet")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A dataset\n")
    (folder / "dataset_infos.json").write_text("{}")


def as_configurations(folder: Path) -> None:
    """Write a dataset's repository whose card names the files of its configurations."""
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl").write_text('{"other": 1}\n')
    main, other = (
        {"config_name": name, "data_files": f"{file}.jsonl"} for name, file in (("default", "a"), ("o", "b"))
    )
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps([other, main])}\n---\n")


CONTAINERS: dict[str, Callable[[Path], object]] = {
    "rows.jsonl": lambda path: path.write_bytes(LINES),
    "rows.JSONL": lambda path: path.write_bytes(LINES),
    "rows.ndjson": lambda path: path.write_bytes(LINES.replace(b"\n", b"\r\n\r\n")),
    "bom.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES),
    "pretty.jsonl": lambda path: path.write_text("\n" + "\n".join(json.dumps(row, indent=1) for row in ROWS)),
    "array.jsonl": lambda path: path.write_text(json.dumps(ROWS) + "\n\n"),
    "data.json": lambda path: path.write_text(json.dumps({"version": "1", "data": ROWS})),
    "array.json": lambda path: path.write_text(json.dumps(ROWS)),
    "pretty.json": lambda path: path.write_text("\ufeff" + json.dumps(ROWS, indent=1), encoding="utf-8"),
    "lines.json": lambda path: path.write_bytes(LINES),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "rows.json.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "rows.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES)),
    "rows.csv": as_csv,
    "semicolons.csv": lambda path: as_csv(path, ";"),
    "rows.tsv": lambda path: as_csv(path, "\t"),
    "rows.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "rows.arrow": as_arrow,
    "file.arrow": lambda path: as_arrow(path, pa.ipc.new_file),
    "shards": as_shards,
    "repository": as_repository,
    "configurations": as_configurations,
}


def tokens_of(path: Path, **settings: Any) -> list[list[int]]:
    train = tiny(corpus="chat", chat__path=path, sequences="padded", sequence_length=64, **settings).read_corpus().train
    assert isinstance(train, PaddedSequences)
    return [part.tolist() for part in np.split(train.store.tokens, train.store.offsets[1:-1])]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(LINES)
    return tokens_of(path)


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_is_read_alike(name: str, expected: list[list[int]], tmp_path: Path) -> None:
    CONTAINERS[name](tmp_path / name)
    found = tokens_of(tmp_path / name)
    assert len(found) == 27 and found == expected


def test_a_pattern_and_the_users_folder_are_found(
    expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_shards(tmp_path / "shards")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tokens_of(tmp_path / "shards" / "*.jsonl") == tokens_of(Path("~/shards")) == expected


def test_many_rows_are_encoded_by_processes_with_the_same_tokens(
    expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_processes, "NUM_BATCHES_ALONE", 0)
    monkeypatch.setattr(token_processes, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(token_processes, "num_cores", lambda: 2)
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    assert tokens_of(tmp_path / "rows.jsonl") == expected


def test_a_process_that_encodes_does_not_wait_for_torch() -> None:
    """Which takes longer to load than it has to encode; a tokenizer needs neither it nor a model."""
    modules = ("token_processes", "tokenizer", "conversation_rows")
    imports = "".join(f"import pipeline.data._support.{name}; " for name in modules)
    words = [sys.executable, "-c", f"{imports}import sys; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(words, cwd=ROOT).returncode == 0


@given(st.lists(st.dictionaries(st.text(max_size=3), st.none() | st.floats(allow_nan=False) | st.text())), st.data())
def test_json_is_read_in_whatever_parts_it_arrives(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    text = json.dumps(rows, indent=data.draw(st.sampled_from([None, 1])), ensure_ascii=data.draw(st.booleans()))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    parts: Iterator[str] = (text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True))
    assert [row for _, row in _values(Path("a.json"), parts)] == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"prompt": "a", "completion": "b"}, {"prompt": "a', "row 2 is not .*; fix or remove it"),
        ("a.json", b"[" * 100_000, "row 1 is not"),
        ("a.jsonl", b'{"prompt": ' + b"[" * 100_000, "are nested too deeply"),
        ("a.jsonl", b'{"prompt": ' + b"1" * 5000 + b"}", "1 are not JSON, line 1 first"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-20], "must be a whole .gz file"),
        ("a.jsonl.gz", LINES, "must be a whole .gz file"),
        ("a.csv", b"prompt,completion\na,b,c\n", "row 1 has more"),
        ("a.arrow", b"nothing", "must be an Arrow file"),
        ("test.jsonl", None, "must have a split train, and .* has test"),
    ],
)
def test_broken_files_are_refused(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(LINES if content is None else content)
    with pytest.raises(InvalidInputError, match=message):
        tokens_of(tmp_path if content is None else path)


def test_a_huge_row_is_read(tmp_path: Path) -> None:
    cell = "word " * 50_000  # more than csv has in a field unless it is told
    (tmp_path / "a.csv").write_text("prompt,completion\n" + f"{cell},Yes.\n" * 2 + "Is it?,Yes.\n" * 8)
    assert max(map(len, tokens_of(tmp_path / "a.csv"))) > 50_000


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_null_text_is_left_out_alike_in_every_container(name: str, tmp_path: Path) -> None:
    rows = [{"text": f"It is {number} of them. " * 20, "id": number} for number in range(12)] + [
        {"text": None, "id": 1}
    ]
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name == "a.csv":
        path.write_text("text,id\n" + "".join(f"{row['text'] or ''},{row['id']}\n" for row in rows))
    else:
        path.write_text(json.dumps(rows) if name == "a.json" else "\n".join(map(json.dumps, rows)))
    prepared = tiny(corpus="text_files", text_files__path=path, sequences="padded").read_corpus()
    assert len(prepared.train) + len(prepared.held_out) == 12
    assert prepared.notes == ("1 of 13 rows are left out: their field text is null",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            [{"role": "user", "content": "a"}],
            "no text but list; set .*field, or read conversations: fitproof main --corpus chat",
        ),
        (["a"], "in row 1 it is no text but list"),
        (3, "no text but int"),
    ],
)
@pytest.mark.parametrize("corpus", ["text_files", "hub"])
def test_a_column_that_is_no_text_is_refused(value: Any, message: str, corpus: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [value] * 20}), tmp_path / "a.parquet")
    source = {"text_files__path": tmp_path / "a.parquet"} if corpus == "text_files" else {"hub__name": str(tmp_path)}
    with pytest.raises(InvalidInputError, match=message):
        tiny(corpus=corpus, **source).read_corpus()


def test_a_folder_of_text_says_what_it_leaves_and_a_mark_of_utf8_is_no_text(tmp_path: Path) -> None:
    for name, text in {"a.txt": "\ufeffHello world. " * 50, "README.md": "# A\nHello. " * 50, "c.rst": "No."}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    prepared = tiny(corpus="text_files", text_files__path=tmp_path).read_corpus()
    assert prepared.notes == ("2 files of the folder are read, and not c.rst (1 .rst)",)
    (tmp_path / "a.txt").unlink()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": "Hello there. " * 30}) + "\n" for _ in range(9)))
    prepared = tiny(corpus="text_files", text_files__path=tmp_path).read_corpus()
    assert "not README.md, c.rst" in prepared.notes[0]


def test_packing_takes_the_time_of_its_documents() -> None:
    """Many sequences with the same space left were searched from the start for each document."""
    assert len(best_fit([300] * 200_000 + [212] * 200_000, 512)) == 200_000
