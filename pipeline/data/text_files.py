"""Text files: .txt, .md, .jsonl or .parquet files, or a folder of them."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline.base.contracts import Corpus, CorpusRequest, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.tokenizing import digest_of, prepare_text

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")


class TextFiles(Corpus):
    """One document for each .txt or .md file, line of a .jsonl file and row of a .parquet file."""

    path: Path | None = None
    """A file, or a folder that is searched recursively for .txt, .md, .jsonl and .parquet files."""
    field: str = "text"
    """The field of a .jsonl line, or the column of a .parquet file, with the text."""

    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the sequences of the files."""
        files = self._files()
        digest = digest_of(part for file in files for part in (self.field, file.suffix, _bytes(file)))
        return prepare_text(lambda: self._documents(files), digest, str(self.path), request)

    def _files(self) -> list[Path]:
        if self.path is None:
            raise InvalidInputError("the corpus text_files needs a file or folder; set text_files.path")
        if not self.path.exists():
            raise InvalidInputError(
                f"text_files.path must exist, and {self.path} does not; name another file or folder"
            )
        if self.path.is_file() and self.path.suffix not in SUFFIXES:
            raise InvalidInputError(
                f"text_files reads {', '.join(SUFFIXES)}, and {self.path} is none of them; rename or convert it"
            )
        files = (
            [self.path]
            if self.path.is_file()
            else sorted(file for file in self.path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        )
        if not files:
            raise InvalidInputError(
                f"text_files reads {', '.join(SUFFIXES)}, and {self.path} has none of them; name another folder"
            )
        return files

    def _documents(self, files: Iterable[Path]) -> Iterator[str]:
        for file in files:
            if file.suffix == ".jsonl":
                yield from self._json_lines(file)
            elif file.suffix == ".parquet":
                yield from self._rows(file)
            else:
                yield _text(file)

    def _json_lines(self, file: Path) -> Iterator[str]:
        for number, line in enumerate(_text(file).split("\n"), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidInputError(
                    f"every line of {file} must be JSON, and line {number} is not ({error.msg}); fix or remove it"
                ) from error
            if not isinstance(record, dict) or not isinstance(record.get(self.field), str):
                names = ", ".join(record) if isinstance(record, dict) else "none"
                raise InvalidInputError(
                    f"every line of {file} must have the text field {self.field!r}, and line {number} does not "
                    f"(its fields: {names}); set text_files.field"
                )
            yield record[self.field]

    def _rows(self, file: Path) -> Iterator[str]:
        import pyarrow
        from pyarrow import parquet

        try:
            names = parquet.read_schema(file).names
            if self.field not in names:
                raise InvalidInputError(
                    f"{file} must have the text column {self.field!r}, and has {', '.join(names)}; set text_files.field"
                )
            column = parquet.read_table(file, columns=[self.field]).column(0).to_pylist()
        except (OSError, pyarrow.ArrowInvalid) as error:
            first = str(error).splitlines()[0]
            raise InvalidInputError(
                f"{file} must be a Parquet file, and cannot be read as one ({first}); fix or remove it"
            ) from error
        yield from (str(text) for text in column if text is not None)


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidInputError(
            f"text_files must be able to read {file}, and cannot ({error.strerror}); change its permissions or the path"
        ) from error


def _text(file: Path) -> str:
    try:
        return _bytes(file).decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"{file} must be UTF-8 text, and byte {error.start} is not; convert it, for example with iconv"
        ) from error
