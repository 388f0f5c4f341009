"""Text files: .txt, .md, .jsonl or .parquet files, or a folder of them."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline.base.contracts import Corpus, CorpusRequest, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.rows import content_of, lines_of, parquet_rows, text_of
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
        digest = digest_of(part for file in files for part in (self.field, file.suffix, content_of(file, "text_files")))
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
            content = content_of(file, "text_files")
            if file.suffix == ".jsonl":
                yield from (self._text(file, place, line) for place, line in lines_of(file, content))
            elif file.suffix == ".parquet":
                yield from (str(text) for _, text in parquet_rows(file, content, self.field) if text is not None)
            else:
                yield text_of(file, content)

    def _text(self, file: Path, place: str, line: str) -> str:
        """Return the text of a line of a .jsonl file."""
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidInputError(
                f"every line of {file} must be JSON, and {place} is not ({error.msg}); fix or remove it"
            ) from error
        if not isinstance(record, dict) or not isinstance(record.get(self.field), str):
            names = ", ".join(record) if isinstance(record, dict) else "none"
            raise InvalidInputError(
                f"every line of {file} must have the text field {self.field!r}, and {place} does not "
                f"(its fields: {names}); set text_files.field"
            )
        return str(record[self.field])
