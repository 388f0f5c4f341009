"""Hugging Face datasets, tokenized with the model's own tokenizer."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline.base.contracts import Corpus, CorpusRequest, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.files import digest_of
from pipeline.data._support.hub_datasets import load_dataset
from pipeline.data._support.rows import counted
from pipeline.data._support.text_rows import TextField
from pipeline.data._support.tokenizing import Count, Source, prepare_text


class Hub(Corpus):
    """One column of one split of a dataset from the Hugging Face hub, or of a local folder of data files."""

    name: str | None = None
    """The dataset's name on the hub, or a local folder."""
    config: str | None = None
    """Name of the dataset's configuration, if it has several."""
    split: str = "train"
    """The split to read; part of it is held out."""
    field: str = "text"
    """The column with the text; rows where it is null are left out."""

    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the dataset's sequences; for a model without a published tokenizer, one is trained on the text."""
        if self.name is None:
            raise InvalidInputError("the corpus hub needs a dataset; set hub.name")
        dataset = load_dataset("hub", self.name, self.config, self.split)
        if self.field not in dataset.column_names:
            raise InvalidInputError(
                f"{self.name} must have the text column {self.field!r}, and has {', '.join(dataset.column_names)}; "
                "set hub.field"
            )
        column = TextField(self.field, "hub.field", f"--chat.name {self.name}")
        source = Source(
            name=f"{self.name} ({self.split})",
            digest=digest_of([dataset._fingerprint, self.field]),
            read=partial(_documents, dataset.select_columns([self.field]), column, self.name),
            amount=len(dataset),
            notes=lambda: column.notes,
        )
        model = replace(request.description, needs_tokenizer=request.description.tokenizer is not None)
        return prepare_text(source, replace(request, description=model))


def _documents(dataset: Any, column: TextField, source: str, count: Count) -> Iterator[str]:
    column.begin()
    return column.texts(counted(dataset, count), source)
