"""Documents of text -> token sequences: tokenized once, cached on disk, cut to one length."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.contracts import Batch, CorpusRequest, InvalidInputError, Prepared, Sequences

SEPARATOR = "<|endoftext|>"
"""The token between two packed documents."""
HELD_OUT_EVERY = 10
"""One document of so many is held out for evaluation."""
IGNORED_LABEL = -100
"""The label that the loss of transformers' models leaves out."""


@dataclass(frozen=True)
class TokenStore:
    """Tokenized documents on disk: all tokens in a row, and where each document starts."""

    tokens: np.ndarray
    """int32, memory-mapped."""
    offsets: np.ndarray
    """int64, one more than there are documents."""

    @classmethod
    def open(cls, folder: Path, name: str) -> "TokenStore":
        """Map the store `name` of `folder`."""
        return cls(np.load(folder / f"{name}.tokens.npy", mmap_mode="r"), np.load(folder / f"{name}.offsets.npy"))

    @staticmethod
    def write(folder: Path, name: str, documents: Sequence[Sequence[int]]) -> None:
        """Write the store `name` into `folder`."""
        lengths = [len(document) for document in documents]
        tokens = np.fromiter((token for document in documents for token in document), np.int32, sum(lengths))
        np.save(folder / f"{name}.tokens.npy", tokens)
        np.save(folder / f"{name}.offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))


class PackedSequences(Sequences):
    """Documents one after the other, cut every `length` tokens: no padding."""

    def __init__(self, store: TokenStore, length: int) -> None:
        self._tokens, self._length = store.tokens, length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return `input_ids` and equal `labels`, both int64 [B, T]."""
        ids_BT = np.stack([self._tokens[row * self._length : (row + 1) * self._length] for row in rows])
        ids = torch.from_numpy(ids_BT.astype(np.int64))
        return {"input_ids": ids, "labels": ids}

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return B x T tokens and B x (T - 1) targets: the model shifts the labels by one."""
        rows, length = batch["labels"].shape
        return rows * length, rows * (length - 1)


class PaddedSequences(Sequences):
    """One document a row, cut or filled up to `length` tokens, the filling masked in the labels."""

    def __init__(self, store: TokenStore, length: int) -> None:
        self._store, self._length = store, length
        self._documents = np.flatnonzero(np.diff(store.offsets) >= 2)  # one token alone has nothing to predict

    def __len__(self) -> int:
        return len(self._documents)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return `input_ids` and `labels`, both int64 [B, T]; causal models never look right, at the padding."""
        ids = torch.zeros(len(rows), self._length, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED_LABEL)
        for row, number in enumerate(rows):
            start, end = self._store.offsets[self._documents[number] :][:2]
            document = torch.from_numpy(self._store.tokens[start : min(end, start + self._length)].astype(np.int64))
            ids[row, : len(document)] = document
            labels[row, : len(document)] = document
        return {"input_ids": ids, "labels": labels}

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the tokens that are not padding, and those of them that have one before them in their row."""
        real = batch["labels"] != IGNORED_LABEL
        return int(real.sum()), int(real[:, 1:].sum())


def prepare_text(read: Callable[[], Iterable[str]], digest: str, source: str, request: CorpusRequest) -> Prepared:
    """Return the sequences of the documents that `read` yields; `digest` says whether they changed since the last time.

    Raises:
        InvalidInputError: no text, an unusable tokenizer, or a cache folder that cannot be written.

    """
    model = request.description
    own_tokenizer = model.tokenizer if model.needs_tokenizer else None
    key = hashlib.sha256(
        repr((digest, own_tokenizer, request.vocabulary_size, tokenizers.__version__, HELD_OUT_EVERY)).encode()
    ).hexdigest()[:16]
    folder = cache_folder() / f"tokens-{key}"
    if not folder.exists():
        _tokenize(list(read()), own_tokenizer, request.vocabulary_size, source, folder)
    sequences = PaddedSequences if request.padded else PackedSequences
    return Prepared(
        train=sequences(TokenStore.open(folder, "train"), request.sequence_length),
        held_out=sequences(TokenStore.open(folder, "held_out"), request.sequence_length),
        vocabulary_size=int((folder / "vocabulary_size").read_text()),
        source=source,
        digest=key,
    )


def cache_folder() -> Path:
    """Return the folder of prepared tokens: $HEADROOM_CACHE, or `headroom` in the user's cache folder.

    Raises:
        InvalidInputError: it cannot be made or written.

    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("HEADROOM_CACHE") or Path(base) / "headroom")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise InvalidInputError(
            f"the cache folder must be writable, and {folder} is not ({error.strerror}); set HEADROOM_CACHE to another"
        ) from error


def digest_of(*parts: bytes | str) -> str:
    """Return a digest of these parts, for a cache key."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _tokenize(documents: list[str], own_tokenizer: str | None, vocabulary_size: int, source: str, folder: Path) -> None:
    """Tokenize into a new folder beside `folder`, then rename it: a reader sees all of it or nothing."""
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise InvalidInputError(f"a corpus needs text, and {source} holds none; name another corpus or file")
    if len(documents) < HELD_OUT_EVERY:
        documents = [part for document in documents for part in _cut(document, HELD_OUT_EVERY)]
    encode, separator, size = _published(own_tokenizer) if own_tokenizer else _trained(documents, vocabulary_size)
    tokens = [[*ids, *separator] for ids in encode(documents)]
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    middle = HELD_OUT_EVERY // 2
    TokenStore.write(work, "held_out", tokens[middle::HELD_OUT_EVERY])
    TokenStore.write(work, "train", [ids for i, ids in enumerate(tokens) if i % HELD_OUT_EVERY != middle])
    (work / "vocabulary_size").write_text(str(size))
    try:
        work.rename(folder)
    except OSError:  # another process was faster, with the same content
        shutil.rmtree(work)


def _cut(document: str, parts: int) -> list[str]:
    length = -(-len(document) // parts)
    return [document[start : start + length] for start in range(0, len(document), length)]


Encode = Callable[[list[str]], list[list[int]]]


def _trained(documents: list[str], vocabulary_size: int) -> tuple[Encode, list[int], int]:
    """Return a byte-level BPE trained on `documents`, its separator and its size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size, special_tokens=[SEPARATOR], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return (
        lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(texts)],
        [0],  # special tokens come first
        vocabulary_size,
    )


def _published(name: str) -> tuple[Encode, list[int], int]:
    """Return the tokenizer that a model was published with, its separator (if it has one) and its size."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"the tokenizer of {name} could not be loaded ({str(error).splitlines()[0]}); check the network and the "
            "name, or give a local folder that holds the tokenizer's files"
        ) from error
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"], separator, len(tokenizer)
