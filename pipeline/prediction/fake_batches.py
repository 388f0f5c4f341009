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


class OfLength(RepeatedRow):
    """The first example of a corpus at another length: what a corpus of such documents has, without reading one."""

    def __init__(self, sequences: Sequences, length: int) -> None:
        """Have examples of `length` tokens, all of which are targets but the first."""
        super().__init__(sequences)
        some = next(iter(self._row.values()))
        num_documents = some[..., 0].numel()
        self._counts = num_documents * length, 1 if some.dim() > 2 else num_documents * (length - 1)
        made = {id(tensor): tensor.new_empty((*tensor.shape[:-1], length)) for tensor in self._row.values()}
        self._row = {name: made[id(tensor)] for name, tensor in self._row.items()}
