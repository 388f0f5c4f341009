"""Token sequences of one length, packed or padded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.base.contracts import Batch, Sequences

IGNORED_LABEL = -100
"""The label of padding, which the loss ignores."""


@dataclass(frozen=True)
class TokenStore:
    """Tokenized documents on disk: their concatenated tokens, and the index at which each document starts."""

    tokens: np.ndarray
    """int32, memory-mapped."""
    offsets: np.ndarray
    """int64, the start of each document, and the number of tokens as the last element."""

    @classmethod
    def open(cls, folder: Path, name: str) -> "TokenStore":
        """Memory-map the store `name` in `folder`."""
        return cls(np.load(folder / f"{name}.tokens.npy", mmap_mode="r"), np.load(folder / f"{name}.offsets.npy"))

    @staticmethod
    def write(folder: Path, name: str, documents: Sequence[Sequence[int]]) -> None:
        """Write the store `name` into `folder`."""
        lengths = [len(document) for document in documents]
        tokens = np.fromiter((token for document in documents for token in document), np.int32, sum(lengths))
        np.save(folder / f"{name}.tokens.npy", tokens)
        np.save(folder / f"{name}.offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))


class PackedSequences(Sequences):
    """Concatenated documents, split every `length` tokens without padding."""

    def __init__(self, store: TokenStore, length: int) -> None:
        self._tokens, self._length = store.tokens, length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return `input_ids` and equal `labels`, both int64 [B, T]."""
        ids_BT = np.stack([self._tokens[row * self._length : (row + 1) * self._length] for row in rows])
        ids = torch.from_numpy(ids_BT).to(torch.int64)  # in memory of torch's allocator, which is measured
        return {"input_ids": ids, "labels": ids}

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return B x T tokens and B x (T - 1) targets, since the labels are shifted by one."""
        rows, length = batch["labels"].shape
        return rows * length, rows * (length - 1)


class PaddedSequences(Sequences):
    """One document in each sequence, truncated or padded to `length` tokens, with the padding masked in the labels."""

    def __init__(self, store: TokenStore, length: int) -> None:
        self._store, self._length = store, length
        self._documents = np.flatnonzero(np.diff(store.offsets) >= 2)  # a single token has no target

    def __len__(self) -> int:
        return len(self._documents)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return `input_ids` and `labels`, both int64 [B, T]; with causal attention the padding needs no mask."""
        ids = torch.zeros(len(rows), self._length, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED_LABEL)
        for row, number in enumerate(rows):
            start, end = self._store.offsets[self._documents[number] :][:2]
            document = torch.from_numpy(self._store.tokens[start : min(end, start + self._length)].astype(np.int64))
            ids[row, : len(document)] = document
            labels[row, : len(document)] = document
        return {"input_ids": ids, "labels": labels}

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the number of tokens that are not padding, and of those with another token before them."""
        real = batch["labels"] != IGNORED_LABEL
        return int(real.sum()), int(real[:, 1:].sum())
