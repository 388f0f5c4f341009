"""Token sequences, packed, packed as whole documents, or padded."""

from collections.abc import Sequence
from copy import copy
from typing import ClassVar

import numpy as np
import torch

from pipeline.base.contracts import Batch, Sequences, SequencesKind
from pipeline.data._support.packing import best_fit
from pipeline.data._support.token_store import TokenStore

IGNORED_LABEL = -100
"""The label of padding and of tokens that are no targets, which the loss ignores."""


class PackedSequences(Sequences):
    """Concatenated documents, split every `length` tokens without padding; those without a target are left out."""

    def __init__(self, store: TokenStore, length: int) -> None:
        self._store, self._length = store, length
        count = len(store.tokens) // length
        self._rows = np.arange(count)
        if store.is_target is not None:
            targets_NT = store.is_target[: count * length].reshape(-1, length)
            self._rows = np.flatnonzero(targets_NT[:, 1:].any(axis=1))
        self.num_left_out = count - len(self._rows)
        """Sequences without a target."""

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return `input_ids` and `labels`, both int64 [B, T]; they are equal where every token is a target."""
        ids = torch.from_numpy(self._cut(self._store.tokens, rows)).to(torch.int64)  # in memory of torch's allocator,
        if self._store.is_target is None:  # which is measured
            return {"input_ids": ids, "labels": ids}
        is_ignored = torch.from_numpy(~self._cut(self._store.is_target, rows))
        return {"input_ids": ids, "labels": ids.masked_fill(is_ignored, IGNORED_LABEL)}

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return B x T tokens, and the targets that have another token before them."""
        labels = batch["labels"]
        return labels.numel(), int((labels[:, 1:] != IGNORED_LABEL).sum())

    def _cut(self, values: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        starts = self._rows[list(rows)] * self._length
        return np.stack([values[start : start + self._length] for start in starts])


class PaddedSequences(Sequences):
    """One document in each sequence, truncated or padded to `length` tokens, with the padding masked in the labels.

    It ends with its last target: no later token changes the loss. Documents that are left without one are left out.
    """

    def __init__(self, store: TokenStore, length: int) -> None:
        self.store = store
        self.padded_length = length
        """Tokens of each sequence in batch(): those of the longest one, or more."""
        last = store.last_targets(length)
        kept = last > store.offsets[:-1]  # the first token of a sequence is no target: none is before it
        self._starts, self._ends = store.offsets[:-1][kept], last[kept] + 1
        self.lengths = self._ends - self._starts
        """Tokens of each sequence, without padding."""
        self.num_left_out = len(kept) - len(self._starts)
        """Documents without a target among their first `length` tokens."""

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return `input_ids` and `labels`, both int64 [B, T]; with causal attention the padding needs no mask."""
        return self._padded(rows, self.padded_length)

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the number of tokens that are not padding, and of targets with another token before them."""
        is_target_BT = batch["labels"] != IGNORED_LABEL
        lengths_B = (is_target_BT * torch.arange(1, is_target_BT.shape[1] + 1)).amax(dim=1)
        return int(lengths_B.sum()), int(is_target_BT[:, 1:].sum())

    def num_positions(self, batch: Batch) -> int:
        """Return B x T."""
        return batch["labels"].numel()

    def mean_tokens(self) -> float:
        """Return the mean length of the documents."""
        return float(self.lengths.mean())

    def _padded(self, rows: Sequence[int], length: int) -> Batch:
        ids = torch.zeros(len(rows), length, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED_LABEL)
        for row, number in enumerate(rows):
            end = int(self.lengths[number])
            self.write(number, ids[row, :end], labels[row, :end])
        return {"input_ids": ids, "labels": labels}

    def write(self, number: int, ids_T: torch.Tensor, labels_T: torch.Tensor) -> None:
        """Write the token ids and labels of one sequence, without padding, into two tensors of its length."""
        self.write_tokens(slice(self._starts[number], self._ends[number]), ids_T, labels_T)

    def write_tokens(self, part: slice, ids_T: torch.Tensor, labels_T: torch.Tensor) -> None:
        """Write the token ids and labels of a part of the store into two tensors of its length."""
        ids_T[:] = labels_T[:] = torch.from_numpy(self.store.tokens[part].astype(np.int64))
        if self.store.is_target is not None:
            labels_T[torch.from_numpy(~self.store.is_target[part])] = IGNORED_LABEL


class PackedDocuments(Sequences):
    """Whole documents, several in one sequence of `length` tokens, which do not attend to one another.

    Each is truncated as in PaddedSequences. `position_ids` begin at 0 with each document, and with the padding after
    the last one; the first token of a document is no target.
    """

    def __init__(self, store: TokenStore, length: int) -> None:
        self.documents = PaddedSequences(store, length)
        self._length, self._lengths = length, self.documents.lengths
        self._rows = best_fit(self._lengths.tolist(), length)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return `input_ids`, `labels` and `position_ids`, all int64 [B, T]."""
        ids = torch.zeros(len(rows), self._length, dtype=torch.int64)
        labels, positions = torch.full_like(ids, IGNORED_LABEL), torch.zeros_like(ids)
        for row, number in enumerate(rows):
            start = 0
            for document in self._rows[number]:
                end = start + int(self._lengths[document])
                self.documents.write(document, ids[row, start:end], labels[row, start:end])
                labels[row, start] = IGNORED_LABEL
                positions[row, start:end] = torch.arange(end - start)
                start = end
            positions[row, start:] = torch.arange(self._length - start)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the number of tokens that are not padding, and of targets."""
        return self.documents.count(batch)

    def num_positions(self, batch: Batch) -> int:
        """Return B x T."""
        return batch["labels"].numel()

    def mean_tokens(self) -> float:
        """Return the mean number of tokens of a sequence, without padding."""
        return float(self._lengths.sum()) / len(self)


class DynamicallyPaddedSequences(PaddedSequences):
    """One document in each sequence, truncated at `length` tokens, and padded to the longest of its micro-batch.

    With `is_grouped` the sequences of an optimizer step are sorted by length first, the longest ones first.
    """

    documents_each: ClassVar[int] = 1
    """Documents of an example, all padded to one length."""

    def __init__(self, store: TokenStore, length: int, *, is_grouped: bool) -> None:
        super().__init__(store, length)
        self.padded_length, self._is_grouped = int(self.lengths.max(initial=0)), is_grouped

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Return the tokens of these examples, without padding."""
        return int(self.lengths[rows].sum())

    def padded_to(self, length: int) -> "DynamicallyPaddedSequences":
        """Return the same sequences, which batch() pads to at least `length` tokens."""
        longer = copy(self)
        longer.padded_length = max(self.padded_length, length)
        return longer

    def micro_batches(self, rows: Sequence[int], size: int) -> tuple[Batch, ...]:
        """Return the examples at these indices in micro-batches of `size`, each as long as its longest example."""
        return tuple(self._padded(part, int(self.lengths[part].max())) for part in self.parts(rows, size))

    def parts(self, rows: Sequence[int], size: int) -> list[list[int]]:
        """Return the indices that are in each of the micro-batches of `size`."""
        ordered = list(rows)
        if self._is_grouped:
            ordered.sort(key=self.lengths.__getitem__, reverse=True)
        return [ordered[cut : cut + size] for cut in range(0, len(ordered), size)]


class PairedSequences(DynamicallyPaddedSequences):
    """Pairs of a chosen and a rejected answer, each with what is before it, truncated and padded as documents are.

    A store has the chosen one of each pair before the rejected one. Pairs with an answer without a target are left out.
    """

    documents_each = 2

    def __init__(self, store: TokenStore, length: int, kind: SequencesKind) -> None:
        self.store, self._is_grouped, self._padding = store, kind == "grouped", 0
        starts_P2, last_P2 = (each.reshape(-1, 2) for each in (store.offsets[:-1], store.last_targets(length)))
        kept_P = np.all(last_P2 > starts_P2, axis=1)
        self._starts, self._ends = starts_P2[kept_P], last_P2[kept_P] + 1
        self.lengths = (self._ends - self._starts).max(axis=1, initial=0)
        if kind == "fixed_length":
            self.lengths = np.full_like(self.lengths, length)
        self.num_left_out = len(kept_P) - len(self._starts)
        self.padded_length = int(self.lengths.max(initial=0))

    def padded_with(self, token: int) -> "PairedSequences":
        """Return the same pairs, which are padded with a token."""
        other = copy(self)
        other._padding = token
        return other

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Return the tokens of both answers of these pairs, with what is before them, without padding."""
        return int((self._ends[rows] - self._starts[rows]).sum())

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the number of tokens that are no padding, and of pairs."""
        labels_PT = batch["labels"].flatten(0, 1)
        return super().count({"labels": labels_PT})[0], len(batch["labels"])

    def _padded(self, rows: Sequence[int], length: int) -> Batch:
        """Return `input_ids` and `labels`, both int64 [B, 2, T]."""
        ids = torch.full((len(rows), 2, length), self._padding, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED_LABEL)
        for row, number in enumerate(rows):
            for side, (start, end) in enumerate(zip(self._starts[number], self._ends[number], strict=True)):
                part = slice(0, end - start)
                self.write_tokens(slice(start, end), ids[row, side, part], labels[row, side, part])
        return {"input_ids": ids, "labels": labels}


class MadeUpPairs(Sequences):
    """Pairs of which each answer is a sequence of another corpus, whose sequences have one length."""

    def __init__(self, sequences: Sequences) -> None:
        self.documents = sequences

    def __len__(self) -> int:
        return len(self.documents) // 2

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return `input_ids` and `labels`, both int64 [B, 2, T]."""
        both = self.documents.batch([2 * row + side for row in rows for side in (0, 1)])
        made = {id(tensor): tensor.view(-1, 2, *tensor.shape[1:]) for tensor in both.values()}
        return {name: made[id(tensor)] for name, tensor in both.items()}

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the number of tokens that are no padding, and of pairs."""
        return self.documents.count({"labels": batch["labels"].flatten(0, 1)})[0], len(batch["labels"])

    def num_positions(self, batch: Batch) -> int:
        """Return B x 2 x T."""
        return batch["labels"].numel()

    def mean_tokens(self) -> float:
        """Return the mean number of tokens of both answers."""
        return 2 * self.documents.mean_tokens()


def documents_of(sequences: Sequences) -> Sequences:
    """Return the sequences of tokens that others are made of, or the sequences themselves."""
    while isinstance(others := getattr(sequences, "documents", None), Sequences):
        sequences = others
    return sequences


def make_sequences(kind: SequencesKind, store: TokenStore, length: int, *, pairs: bool = False) -> Sequences:
    """Return the documents of a store as sequences of at most `length` tokens; with `pairs` two of them each."""
    if pairs:
        return PairedSequences(store, length, kind)
    if kind == "packed":
        return PackedSequences(store, length)
    if kind == "packed_documents":
        return PackedDocuments(store, length)
    if kind == "fixed_length":
        return PaddedSequences(store, length)
    return DynamicallyPaddedSequences(store, length, is_grouped=kind == "grouped")
