"""Files of rows: JSON, JSON Lines, CSV, Parquet and Arrow, plain or compressed, read one row after the other."""

import bz2
import codecs
import csv
import gzip
import hashlib
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from pipeline.base.errors import InvalidInputError, first_line

Row = Any
"""A row as its file has it: an object with names, or the text of a line of JSON Lines, which is not parsed yet."""
ARROW_FILE = b"ARROW1"
"""How a file in Arrow's file format begins."""
COMPRESSED: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}  # type: ignore[dict-item]
"""How files with a second suffix are opened."""
ROWS_AT_ONCE = 1000
"""Of a Parquet file, in memory as Python objects."""
CHUNK_BYTES = 2**20
BETWEEN_VALUES = re.compile(r"[ \t\r\n,]*")
"""What separates the values of a JSON file."""


def kind_of(path: Path) -> str:
    """Return the suffix that says what a file is, in lower case and without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return ("", *suffixes)[-2 if suffixes and suffixes[-1] in COMPRESSED and len(suffixes) > 1 else -1]


def rows_of(path: Path, count: Callable[[int], None]) -> Iterator[tuple[str, Row]]:
    """Return the rows of a file, each with its place; `count` receives the bytes of the file as they are read.

    Raises:
        InvalidInputError: the file cannot be read, or is not what its suffix says.

    """
    kind = kind_of(path)
    with _opened(path, count) as stream:
        yield from READERS[kind](path, stream)


def text_of(path: Path, count: Callable[[int], None]) -> str:
    """Return the content of a file as text; raise InvalidInputError if it is not UTF-8."""
    with _opened(path, count) as stream:
        return "".join(_text(path, stream))


def digest_of_files(files: Sequence[Path]) -> str:
    """Return a digest of what files hold; raise InvalidInputError if one cannot be read."""
    digests = []
    for path in files:
        try:
            about = path.stat()
            digests.append(
                f"{kind_of(path)} {path.suffix.lower()} {_digest(path.absolute(), (about.st_size, about.st_mtime_ns))}"
            )
        except OSError as error:
            raise _unreadable(path, error) from error
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


@lru_cache(maxsize=10_000)
def _digest(path: Path, state: tuple[int, int]) -> str:
    """Return the digest of a file, which is read once while its size and its time, `state`, are the same."""
    del state
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Counted(io.FileIO):
    """A file that counts the bytes that are read of it."""

    def __init__(self, path: Path, count: Callable[[int], None]) -> None:
        super().__init__(path)
        self._count = count

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`, and count."""
        num_bytes = super().readinto(buffer) or 0
        self._count(num_bytes)
        return num_bytes


@contextmanager
def _opened(path: Path, count: Callable[[int], None]) -> Iterator[IO[bytes]]:
    try:
        plain = io.BufferedReader(_Counted(path, count), CHUNK_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error
    with plain:
        decompress = COMPRESSED.get(path.suffix.lower())
        yield decompress(plain) if decompress else plain


def _unreadable(path: Path, error: OSError) -> InvalidInputError:
    return InvalidInputError(
        f"a corpus must name readable files, and {path} cannot be read ({error.strerror}); name another file, or "
        "change its permissions"
    )


def _text(path: Path, stream: IO[bytes]) -> Iterator[str]:
    """Return the text of a file in parts; a byte order mark is none of it."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    num_read = 0
    while True:
        try:
            content = stream.read(CHUNK_BYTES)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise InvalidInputError(
                f"{path} must be a whole {path.suffix} file, and cannot be read as one ({first_line(error)}); fix or "
                "remove it"
            ) from error
        num_read += len(content)
        try:
            yield decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                f"{path} must be UTF-8 text, and byte {num_read - len(error.object) + error.start} is not; convert it, "
                "for example with iconv"
            ) from error
        if not content:
            return


def _lines(path: Path, stream: IO[bytes]) -> Iterator[str]:
    """Return the lines of a file, which end at a newline alone."""
    parts: list[str] = []
    for text in _text(path, stream):
        first, *others = text.split("\n")
        parts.append(first)
        for line in others:
            yield "".join(parts)
            parts = [line]
    yield "".join(parts)


def _json_lines(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, Row]]:
    """Return the lines that are not blank; a file that is one array, or values of several lines, is read as those."""
    numbered = ((number, line) for number, line in enumerate(_lines(path, stream), 1) if line.strip())
    begin = [*islice(numbered, 2)]
    first = begin[0][1].strip() if begin else ""
    is_longer = first == "{" or (first[:1] == "[" and (len(begin) == 1 or not first.endswith("]")))
    everything = chain(begin, numbered)
    if is_longer:
        yield from _values(path, (f"{line}\n" for _, line in everything))
    else:
        yield from ((f"line {number}", line) for number, line in everything)


def _json(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, Row]]:
    """Return the values of an array, values one after another, or those of the field `data` of a single object."""
    values = _values(path, _text(path, stream))
    begin = [*islice(values, 2)]
    only = begin[0][1] if len(begin) == 1 else None
    if isinstance(only, dict) and isinstance(rows := only.get("data"), list):
        return ((f"row {number}", row) for number, row in enumerate(rows, 1))
    return chain(begin, values)


def _values(path: Path, texts: Iterable[str]) -> Iterator[tuple[str, Row]]:
    """Return the values of an array, or values one after another; no more text is kept than that of one of them."""
    read = json.JSONDecoder().raw_decode
    parts, text, position, number = iter(texts), "", 0, 0
    is_begun = is_open = False  # the array
    while True:
        position = BETWEEN_VALUES.match(text, position).end()  # type: ignore[union-attr]
        if text[position : position + 1] == ("]" if is_open else "[") and (is_open or not is_begun):
            is_begun, is_open, position = True, not is_open, position + 1
            continue
        try:
            if position == len(text):
                raise json.JSONDecodeError("the file ends", text, position)
            value, position = read(text, position)
        except (ValueError, RecursionError) as error:
            more = _at_least(parts, 1 + len(text) - position)
            if not more:
                if position == len(text) and not is_open:
                    return
                reason = first_line(error) if isinstance(error, ValueError) else "it is nested too deeply"
                raise InvalidInputError(
                    f"{path} must be JSON, an array of rows or rows one after another, and row {number + 1} is not "
                    f"({reason}); fix or remove it"
                ) from error
            text, position = text[position:] + more, 0
            continue
        is_begun, number = True, number + 1
        yield f"row {number}", value


def _at_least(parts: Iterator[str], num_characters: int) -> str:
    """Return so many characters of what follows, or more, or all that is left."""
    found, length = [], 0
    for part in parts:
        found.append(part)
        length += len(part)
        if length >= num_characters:
            break
    return "".join(found)


def _csv(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, Row]]:
    """Return the rows of a table with a line of names; an empty cell is null."""
    csv.field_size_limit(sys.maxsize)
    lines = (f"{line}\n" for line in _lines(path, stream))
    head = next(lines, "")
    separator = max(",;\t", key=head.count)
    reader = csv.DictReader(chain([head], lines), delimiter=separator)
    try:
        for number, row in enumerate(reader, 1):
            if None in row:
                raise InvalidInputError(
                    f"every row of {path} must have as many cells as its first line, and row {number} has more; quote "
                    "cells that have a separator in them"
                )
            yield f"row {number}", {name: value or None for name, value in row.items()}
    except csv.Error as error:
        raise InvalidInputError(f"{path} must be CSV, and is not ({error}); fix or remove it") from error


def _parquet(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, Row]]:
    from pyarrow import parquet

    return _of_batches(path, lambda: parquet.ParquetFile(stream).iter_batches(ROWS_AT_ONCE))


def _arrow(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, Row]]:
    """Return the rows of a file in Arrow's stream format, as the package datasets saves it, or in its file format."""
    import pyarrow

    def batches() -> Iterator[Any]:
        is_file = stream.read(len(ARROW_FILE)) == ARROW_FILE
        stream.seek(0)
        if not is_file:
            yield from pyarrow.ipc.open_stream(stream)
            return
        file = pyarrow.ipc.open_file(stream)
        yield from map(file.get_batch, range(file.num_record_batches))

    return _of_batches(path, batches)


def _of_batches(path: Path, batches: Callable[[], Iterable[Any]]) -> Iterator[tuple[str, Row]]:
    import pyarrow

    number = 0
    try:
        for batch in batches():
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        name = {".parquet": "a Parquet", ".arrow": "an Arrow"}[kind_of(path)]
        raise InvalidInputError(
            f"{path} must be {name} file, and cannot be read as one ({first_line(error)}); fix or remove it"
        ) from error


READERS: dict[str, Callable[[Path, IO[bytes]], Iterator[tuple[str, Row]]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
"""How each kind of file is read."""


def counted(rows: Iterable[Any], count: Callable[[int], None]) -> Iterator[tuple[str, Any]]:
    """Yield rows with their places; `count` receives that there is one more."""
    for number, row in enumerate(rows, 1):
        count(1)
        yield f"row {number}", row
