"""The rows of files of data: lines of .jsonl files, rows of .parquet files."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.base.errors import InvalidInputError, first_line


def content_of(path: Path, setting: str) -> bytes:
    """Return the bytes of a file that a setting names; raise InvalidInputError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(
            f"{setting} must name readable files, and {path} cannot be read ({error.strerror}); name another file, or "
            "change its permissions"
        ) from error


def text_of(path: Path, content: bytes) -> str:
    """Return the content of a file as text; raise InvalidInputError if it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"{path} must be UTF-8 text, and byte {error.start} is not; convert it, for example with iconv"
        ) from error


def lines_of(path: Path, content: bytes) -> Iterator[tuple[str, str]]:
    """Return the lines that are not blank, each with its place; they are not parsed."""
    text = text_of(path, content)
    return ((f"line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def parquet_rows(path: Path, content: bytes, column: str | None = None) -> Iterator[tuple[str, Any]]:
    """Return the rows, each with its place, or the values of one column.

    Raises:
        InvalidInputError: it is no Parquet file, or does not have the column.

    """
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(content))
        if column is None:
            return numbered(file.read().to_pylist())
        names = file.schema_arrow.names
        if column in names:
            return numbered(file.read(columns=[column]).column(0).to_pylist())
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise InvalidInputError(
            f"{path} must be a Parquet file, and cannot be read as one ({first_line(error)}); fix or remove it"
        ) from error
    raise InvalidInputError(
        f"{path} must have the text column {column!r}, and has {', '.join(names)}; set text_files.field"
    )


def numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Return rows with their places."""
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))
