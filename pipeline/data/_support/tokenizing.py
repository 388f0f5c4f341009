"""Tokenization of documents into sequences, cached on disk."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import tokenizers

from pipeline.base.contracts import CorpusRequest, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.files import cache_folder, digest_of
from pipeline.base.progress import progress
from pipeline.data._support.sequences import make_sequences
from pipeline.data._support.token_processes import Encode, encoded, in_batches
from pipeline.data._support.token_store import TokenStore, TokenWriter
from pipeline.data._support.tokenizer import (
    Encoded,
    TextEncoder,
    load_tokenizer,
    tokenizer_identity,
    train_tokenizer,
)

HELD_OUT_EVERY = 10
"""One document of this many is held out for evaluation; of fewer documents than half as many, the second."""
ABOUT = "about.json"

Count = Callable[[int], None]
"""Receives how much of a corpus was read, in the unit of its `amount`."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What is known of a tokenized corpus beside its tokens."""

    vocabulary_size: int
    notes: tuple[str, ...] = ()
    """What was read and what was not, a sentence each."""
    is_plain: bool = True
    """Whether other frameworks find the same in its rows as they are."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a corpus is read from."""

    name: str
    digest: str
    read: Callable[[Count], Iterable[Any]]
    """Returns the documents as text, or rows with their places; it may be called again."""
    amount: int = 0
    """Of what is counted as they are read: bytes, or rows; 0 if it is not known before."""
    notes: Callable[[], tuple[str, ...]] = tuple
    """Returns what was read and what was not, once all documents were read."""
    note: str | None = None
    """What of a folder is not read, in a sentence."""


def prepare_text(source: Source, request: CorpusRequest) -> Prepared:
    """Return the sequences of documents that are text, from the cache if their digest is that of an earlier call.

    Raises:
        InvalidInputError: no text, an unusable tokenizer, or a cache folder that cannot be written.

    """
    model = request.description
    own_tokenizer = model.tokenizer if model.needs_tokenizer else None

    def tokenize(store: Callable[[Encoded], None]) -> About:
        encoder, size = _text_encoder(documents, own_tokenizer, request.vocabulary_size)
        if not encode_all(documents, encoder, store):
            raise InvalidInputError(f"a corpus needs text, and {source.name} has none; name another corpus or file")
        return About(vocabulary_size=size, notes=source.notes())

    documents = replace(source, read=lambda count: _documents(source.read(count)))
    identity = (source.digest, own_tokenizer and tokenizer_identity(own_tokenizer), request.vocabulary_size)
    return prepare_tokens(tokenize, identity, source, request)


def prepare_documents(name: str, documents: Sequence[str], request: CorpusRequest) -> Prepared:
    """Return the sequences of documents that are in memory, as prepare_text() does."""
    return prepare_text(Source(name=name, digest=digest_of(documents), read=lambda _: documents), request)


def prepare_tokens(
    tokenize: Callable[[Callable[[Encoded], None]], About],
    identity: tuple[object, ...],
    source: Source,
    request: CorpusRequest,
    *,
    pairs: bool = False,
) -> Prepared:
    """Return the sequences of the documents that `tokenize` stores, which is called if no equal `identity` is cached.

    With `pairs` two documents that follow one another are a row, and an example.

    Raises:
        InvalidInputError: the cache folder cannot be written, or `tokenize` raises it.

    """
    key = hashlib.sha256(repr((*identity, tokenizers.__version__, HELD_OUT_EVERY, ABOUT)).encode()).hexdigest()[:16]
    folder = token_folder(key)
    if not folder.exists():
        _write(tokenize, folder, 2 if pairs else 1)
    train, held_out = (
        make_sequences(request.sequences, TokenStore.open(folder, name), request.sequence_length, pairs=pairs)
        for name in ("train", "held_out")
    )
    about = json.loads((folder / ABOUT).read_text())
    return Prepared(
        train=train,
        held_out=held_out,
        vocabulary_size=about["vocabulary_size"],
        source=source.name,
        digest=key,
        notes=(*about["notes"], *filter(None, (source.note,))),
        is_plain=about["is_plain"],
    )


def token_folder(digest: str) -> Path:
    """Return the cache folder of the tokens of a corpus with this digest."""
    return cache_folder() / f"tokens-{digest}"


def encode_all(source: Source, encode: Encode, store: Callable[[Encoded], None]) -> int:
    """Encode and store all documents, report how far that is, and return their number."""
    num_documents = 0
    with progress(f"tokenizing {source.name}", source.amount) as count:
        for batch in encoded(in_batches(source.read(count)), encode):
            store(batch)
            num_documents += len(batch.lengths)
    return num_documents


def _text_encoder(documents: Source, own: str | None, vocabulary_size: int) -> tuple[TextEncoder, int]:
    """Return the encoder of a tokenizer of its own, or of one that is trained on the documents, and its size."""
    if own:
        tokenizer = load_tokenizer(own)
        return TextEncoder(tokenizer, tokenizer.eos_token_id), len(tokenizer)
    with progress(f"training a tokenizer on {documents.name}", documents.amount) as count:
        trained = train_tokenizer(documents.read(count), vocabulary_size)
    return TextEncoder(trained, 0), vocabulary_size  # the special token has the first id


def _documents(texts: Iterable[str]) -> Iterator[str]:
    """Yield the documents that are not blank; few documents are cut into parts, so that some can be held out."""
    documents = (text for text in texts if text.strip())
    first = list(islice(documents, HELD_OUT_EVERY))
    if len(first) < HELD_OUT_EVERY:
        first = [part for document in first for part in _split(document, HELD_OUT_EVERY)]
    yield from chain(first, documents)


def _split(document: str, num_parts: int) -> list[str]:
    length = -(-len(document) // num_parts)
    return [document[start : start + length] for start in range(0, len(document), length)]


def _write(tokenize: Callable[[Callable[[Encoded], None]], About], folder: Path, documents_each: int) -> None:
    """Write tokens, and what is known of them, into a temporary folder and rename it to `folder`, which is atomic."""
    work = folder.with_name(f"{folder.name}.{uuid4().hex}.part")
    work.mkdir()  # with the rights of its parent, whose users may be several
    try:
        with _Splitter(work, documents_each) as splitter:
            about = tokenize(splitter.add)
        (work / ABOUT).write_text(json.dumps(asdict(about)))
        work.rename(folder)
    except BaseException as error:
        shutil.rmtree(work)
        if not (isinstance(error, OSError) and folder.exists()):  # another process has written the same content
            raise


class _Splitter:
    """Writes the documents of rows into two stores: those to train on, and those that are held out."""

    def __init__(self, folder: Path, documents_each: int) -> None:
        self._folder, self._documents_each, self._stack = folder, documents_each, ExitStack()
        self._num_rows = 0
        self._first: list[Encoded] = []
        """Documents that are not written yet, as the number of rows decides which of them is held out."""

    def __enter__(self) -> "_Splitter":
        self._train = self._stack.enter_context(TokenWriter(self._folder, "train"))
        self._held_out = self._stack.enter_context(TokenWriter(self._folder, "held_out"))
        return self

    def add(self, documents: Encoded) -> None:
        """Write documents that follow those before."""
        self._first.append(documents)
        num_waiting = sum(len(each.lengths) for each in self._first) // self._documents_each
        if self._num_rows + num_waiting > HELD_OUT_EVERY // 2:
            self._flush(HELD_OUT_EVERY // 2)

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._flush(1)
        self._stack.__exit__(*error)

    def _flush(self, held_out: int) -> None:
        """Write what waits; the row of the number `held_out`, and each HELD_OUT_EVERY after it, is held out."""
        for each in self._first:
            numbers = self._num_rows + np.arange(len(each.lengths) // self._documents_each)
            is_held_out = np.repeat(numbers % HELD_OUT_EVERY == held_out, self._documents_each)
            self._num_rows += len(numbers)
            of_tokens = np.repeat(is_held_out, each.lengths)
            for writer, chosen, tokens in (
                (self._train, ~is_held_out, ~of_tokens),
                (self._held_out, is_held_out, of_tokens),
            ):
                targets = None if each.is_target is None else each.is_target[tokens]
                writer.add(each.tokens[tokens], each.lengths[chosen], targets)
        self._first = []
