"""Text files: documents, or rows with a field of text."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pipeline.base.contracts import Corpus, CorpusRequest, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.files import digest_of
from pipeline.data._support.data_files import DataFiles, find_data_files
from pipeline.data._support.rows import READERS, digest_of_files, kind_of, text_of
from pipeline.data._support.text_rows import TextField
from pipeline.data._support.tokenizing import Count, Source, prepare_text

DOCUMENTS = (".txt", ".md")


class TextFiles(Corpus):
    """One document for each .txt or .md file, and for each row of .jsonl, .json, .csv, .parquet or .arrow files."""

    path: Path | None = None
    """A file (also .gz, .bz2, .xz), a pattern with *, or a folder; of a dataset's folder the split train is read."""
    field: str = "text"
    """The field of a row with the text; rows where it is null are left out."""

    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the sequences of the files."""
        if self.path is None:
            raise InvalidInputError("the corpus text_files needs a file or folder; set text_files.path")
        files = find_data_files(self.path, "text_files.path", (*DOCUMENTS, *READERS))
        column = TextField(self.field, "text_files.field", f"--chat.path {self.path}")
        source = Source(
            name=str(self.path),
            digest=digest_of([self.field, digest_of_files(files.files)]),
            read=partial(_documents, files, column),
            amount=files.num_bytes,
            notes=lambda: column.notes,
            note=files.note,
        )
        return prepare_text(source, request)


def _documents(files: DataFiles, column: TextField, count: Count) -> Iterator[str]:
    column.begin()
    for path in files.files:
        if kind_of(path) in DOCUMENTS:
            yield text_of(path, count)
        else:
            yield from column.texts(files.rows(path, count), str(path))
