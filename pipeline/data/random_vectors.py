"""Random inputs and targets for models that take vectors."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from pipeline.base.contracts import Batch, Corpus, CorpusRequest, Prepared, Sequences
from pipeline.base.files import digest_of


class RandomVectors(Corpus):
    """Normally distributed vectors of the model's width."""

    kind: ClassVar[str] = "vectors"

    num_sequences: PositiveInt = Field(default=64, le=65_536)
    """Sequences to train on; each takes 2 x T x C x 4 bytes of host memory."""

    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the sequences, which depend only on the seed and the shape."""
        length, width = request.sequence_length, request.description.width
        assert width is not None  # models that take vectors have it
        generator = torch.Generator().manual_seed(request.seed)

        def make(count: int) -> "VectorSequences":
            shape = (count, length, width)
            return VectorSequences(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))

        return Prepared(
            train=make(self.num_sequences),
            held_out=make(max(1, self.num_sequences // 8)),
            vocabulary_size=0,
            source="random numbers",
            digest=digest_of([str((request.seed, self.num_sequences, length, width))])[:16],
        )


class VectorSequences(Sequences):
    """Inputs and targets in memory."""

    def __init__(self, inputs_NTC: Tensor, targets_NTC: Tensor) -> None:
        self._inputs_NTC, self._targets_NTC = inputs_NTC, targets_NTC

    def __len__(self) -> int:
        return len(self._inputs_NTC)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return `inputs` and `targets`, both float32 [B, T, C]."""
        index = torch.tensor(rows)
        return {"inputs": self._inputs_NTC[index], "targets": self._targets_NTC[index]}

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return B x T positions and B x T x C targets."""
        rows, length, width = batch["targets"].shape
        return rows * length, rows * length * width
