"""Conversations: questions and answers, rendered by the model's own chat template, with the loss on the answers."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

from pipeline.base.chat_template import (
    ANSWERS,
    ENCODING,
    TEMPLATE,
    Message,
    UnreadableRowError,
    load_chat_template,
    trained_chat_template,
)
from pipeline.base.contracts import Corpus, CorpusRequest, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.hub_datasets import load_dataset
from pipeline.base.rows import content_of, lines_of, numbered, parquet_rows
from pipeline.base.tokenizing import Tokenized, digest_of, prepare_tokens, tokenizer_identity

SHIPPED = Path(__file__).with_name("questions.jsonl")
"""Short questions and answers about training, computing and the world."""
SUFFIXES = (".jsonl", ".parquet")
FORMS = "messages, a list of role and content, or prompt and completion"

Given = TypeVar("Given")
Made = TypeVar("Made")


class Chat(Corpus):
    """Conversations of a file or a dataset, each with messages, or with prompt and completion; answers are targets."""

    path: Path | None = None
    """A .jsonl or .parquet file; none: the dataset chat.name, or short questions and answers that Fitproof has."""
    name: str | None = None
    """A dataset's name on the Hugging Face hub, or a local folder of data files."""
    config: str | None = None
    """Name of the dataset's configuration, if it has several."""
    split: str = "train"
    """The split of the dataset to read; part of it is held out."""

    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the conversations' sequences; a model without a published tokenizer gets one with a template."""
        rows, digest, source = self._rows()
        model = request.description
        own = model.tokenizer if model.needs_tokenizer else None
        template = tokenizer_identity(own) if own else TEMPLATE
        identity = (digest, template, request.vocabulary_size, ENCODING, version("transformers"))

        def tokenize() -> Tokenized:
            conversations = _read(rows(), _messages, source)
            return _tokenized(conversations, own, request.vocabulary_size, source)

        prepared = prepare_tokens(tokenize, identity, source, request)
        if request.sequences != "packed" and not len(prepared.train):
            raise InvalidInputError(
                f"an answer must begin within sequence_length tokens, and in {source} none does in the first "
                f"{request.sequence_length}; set a longer sequence_length"
            )
        return prepared

    def _rows(self) -> tuple[Callable[[], Iterable[tuple[str, Any]]], str, str]:
        """Return a function that yields rows with their places, a digest of them, and where they come from."""
        if self.path is not None and self.name is not None:
            raise InvalidInputError(
                f"chat reads one source, and chat.path={self.path} and chat.name={self.name} are two; set one of them"
            )
        if self.name is None and (self.config is not None or self.split != "train"):
            raise InvalidInputError(
                f"chat.config and chat.split are of a dataset, and chat.name is none (chat.config is "
                f"{self.config or 'none'}, chat.split {self.split}); set chat.name, or leave them out"
            )
        if self.name is not None:
            dataset = load_dataset("chat", self.name, self.config, self.split)
            return partial(numbered, dataset), digest_of([dataset._fingerprint]), f"{self.name} ({self.split})"
        path = self.path or SHIPPED
        if path.suffix not in SUFFIXES:
            raise InvalidInputError(
                f"chat.path must be a file of {' or '.join(SUFFIXES)}, and {path} is none; convert it, or name another"
            )
        content = content_of(path, "chat.path")
        read = lines_of if path.suffix == ".jsonl" else parquet_rows
        source = f"Fitproof's {path.name}" if path == SHIPPED else str(path)
        return partial(read, path, content), digest_of([path.suffix, content]), source


def _messages(row: Any) -> list[Message]:
    """Return the messages of a row, which a line of .jsonl has as text."""
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except json.JSONDecodeError as error:
            raise UnreadableRowError("are not JSON", error.msg) from error
    if not isinstance(row, Mapping):
        raise UnreadableRowError("are not objects with names")
    if row.get("messages") is not None:
        turns = row["messages"]
    elif row.get("prompt") is not None and row.get("completion") is not None:
        turns = [*_turns(row["prompt"], "user"), *_turns(row["completion"], ANSWERS)]
    else:
        raise UnreadableRowError(
            "have neither messages nor prompt and completion", f"its fields: {', '.join(map(str, row)) or 'none'}"
        )
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise UnreadableRowError("have messages that are not a list of objects with role and content")
    if not all(isinstance(turn.get(name), str) for turn in turns for name in ("role", "content")):
        raise UnreadableRowError("have a message whose role or content is not text")
    answers = [number for number, turn in enumerate(turns) if turn["role"] == ANSWERS]
    if not answers or not all(turns[number]["content"].strip() for number in answers):
        raise UnreadableRowError(f"have no answer: a message of the role {ANSWERS} that is not empty")
    if answers[0] == 0:
        raise UnreadableRowError("begin with an answer, and have no question before it")
    return [{name: value for name, value in turn.items() if value is not None} for turn in turns]


def _turns(value: Any, role: str) -> list[Any]:
    """Return a prompt or a completion as messages, which it may be already."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _tokenized(
    conversations: Mapping[str, Sequence[Message]], own: str | None, vocabulary_size: int, source: str
) -> Tokenized:
    """Return the conversations as tokens of the tokenizer `own`, or of one that is trained on them."""
    template = load_chat_template(own) if own else trained_chat_template([*conversations.values()], vocabulary_size)
    encoded = _read(conversations.items(), template.encode, source).values()
    return Tokenized(
        documents=[ids for ids, _ in encoded],
        vocabulary_size=len(template.tokenizer) if own else vocabulary_size,
        is_target=[is_target for _, is_target in encoded],
    )


def _read(rows: Iterable[tuple[str, Given]], make: Callable[[Given], Made], source: str) -> dict[str, Made]:
    """Return what `make` returns for each row, by its place.

    Raises:
        InvalidInputError: there are no rows, or `make` refuses some; with their number by reason.

    """
    made: dict[str, Made] = {}
    refused: dict[str, list[str]] = {}
    for place, row in rows:
        try:
            made[place] = make(row)
        except UnreadableRowError as error:
            first = f"{place} first" + (f" ({shorten(error.detail, 100)})" if error.detail else "")
            refused.setdefault(error.reason, []).append(first)
    if refused:
        count = sum(map(len, refused.values()))
        reasons = "; ".join(f"{len(places)} {reason}, {places[0]}" for reason, places in refused.items())
        raise InvalidInputError(
            f"every row of {source} must be a conversation with an answer ({FORMS}), and {count} of "
            f"{count + len(made)} are not: {reasons}; fix or remove them"
        )
    if not made:
        raise InvalidInputError(f"a corpus needs conversations, and {source} has none; name another file or dataset")
    return made
