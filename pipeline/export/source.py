"""The data of a run, as other frameworks read them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.experiment import Experiment
from pipeline.data._support.chat_template import (
    ANSWERS,
    MARKED_ANSWERS,
    TODAY,
    ChatTemplate,
    UnreadableRowError,
    load_chat_template,
)
from pipeline.data._support.rows import kind_of
from pipeline.data.chat import SHIPPED, Chat
from pipeline.data.hub import Hub
from pipeline.data.text_files import TextFiles

FORMATS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".md": "text",
}
"""The names that the package datasets has for formats of files, by suffix."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file or a dataset, and what its rows are."""

    path: str
    """Of a file or folder, or the name of a dataset."""
    file_format: str | None = None
    """Format of a file; None for a dataset."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Of a dataset: its configuration as `name`, and its split."""
    text_field: str = "text"
    """The column with the text of rows that are no conversations."""
    is_chat: bool = False
    """Whether its rows are conversations."""
    marks_answers: bool = False
    """Whether the model's own chat template marks answers with {% generation %}, the same on every day."""
    is_plain: bool = True
    """Whether its rows are as the chat template takes them, in a file that the package datasets reads like Fitproof."""
    end_of_answer: str | None = None
    """The token that ends an answer there, if it is one of those added to the tokenizer's vocabulary."""


def data_source(experiment: Experiment, *, is_plain: bool) -> Source | None:
    """Return where the rows come from; None for a corpus that no other framework can read.

    Raises:
        InvalidInputError: the tokenizer of the model cannot be loaded.

    """
    corpus: Any = experiment.corpus
    if isinstance(corpus, Chat):
        path = None if corpus.name else corpus.path or SHIPPED
        described = experiment.description
        template = load_chat_template(str(described.tokenizer)) if described.needs_tokenizer else None
        is_read_alike = path is None or path.suffix == ".parquet" or _is_json_lines(path)
        return _source(
            path,
            corpus,
            is_chat=True,
            is_plain=is_plain and is_read_alike,
            **(_of_template(template) if template else {}),
        )
    if isinstance(corpus, TextFiles) and corpus.path is not None and kind_of(corpus.path) == ".tsv":
        return None  # the package datasets separates columns by commas
    if isinstance(corpus, TextFiles):
        return _source(corpus.path, corpus, text_field=corpus.field)
    return _source(None, corpus, text_field=corpus.field) if isinstance(corpus, Hub) else None


def _is_json_lines(path: Path) -> bool:
    """Whether a file has an object of JSON in its first line."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    with path.open(encoding="utf-8-sig") as file:
        first = next((line for line in file if line.strip()), "")
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _of_template(template: ChatTemplate) -> dict[str, Any]:
    tokenizer = template.tokenizer
    text = tokenizer.get_chat_template()
    try:
        ids, is_target = template.encode([{"role": "user", "content": "?"}, {"role": ANSWERS, "content": "!"}])
    except UnreadableRowError:  # a template that wants more than a question and an answer
        ids, is_target = [], []
    end = tokenizer.decode([ids[number] for number in np.flatnonzero(is_target)[-1:]])
    return {
        "marks_answers": MARKED_ANSWERS.search(text) is not None and TODAY.search(text) is None,
        "end_of_answer": end if end in tokenizer.get_added_vocab() else None,
    }


def _source(path: Path | None, corpus: Any, **more: Any) -> Source:
    if path is not None:
        path = path.expanduser().absolute()
        return Source(path=str(path), file_format=FORMATS.get(kind_of(path)), **more)
    names = {"name": corpus.config, "split": corpus.split}
    return Source(path=corpus.name, more={name: value for name, value in names.items() if value}, **more)
