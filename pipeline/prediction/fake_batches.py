"""Batches of any size with the shape of a corpus's examples."""

from collections.abc import Sequence

import torch

from pipeline.base.contracts import Batch, Sequences


class RepeatedRow(Sequences):
    """The first example of a corpus, repeated: the memory of a run depends on its shape only."""

    def __init__(self, sequences: Sequences, num_rows: int = 0) -> None:
        """Repeat the first example in batches of at least `num_rows` sequences, on the CPU."""
        self._row = sequences.batch([0])
        self._counts = sequences.count(self._row)
        self._num_rows = num_rows

    def __len__(self) -> int:
        return 1

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return empty tensors of the example's shapes; names that share a tensor still share it."""
        num_rows = max(len(rows), self._num_rows)
        made = {
            id(tensor): torch.empty((num_rows, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in self._row.values()
        }
        return {name: made[id(tensor)] for name, tensor in self._row.items()}

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the tokens and targets of the batch, whose rows are equal."""
        num_rows = len(next(iter(batch.values())))
        num_tokens, num_targets = self._counts
        return num_rows * num_tokens, num_rows * num_targets


class OfLength(Sequences):
    """The first example of a corpus at another length: what a corpus of such documents has, without reading one."""

    def __init__(self, sequences: Sequences, length: int) -> None:
        """Have examples of `length` tokens, all of which are targets but the first."""
        self._row, self._length = sequences.batch([0]), length

    def __len__(self) -> int:
        return 1

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return empty tensors of the example's types; names that share a tensor still share it."""
        made = {
            id(tensor): torch.empty((len(rows), *tensor.shape[1:-1], self._length), dtype=tensor.dtype)
            for tensor in self._row.values()
        }
        return {name: made[id(tensor)] for name, tensor in self._row.items()}

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the tokens and targets of the batch."""
        some = next(iter(batch.values()))
        num_documents = some[..., 0].numel()
        return num_documents * self._length, len(some) if some.dim() > 2 else num_documents * (self._length - 1)
