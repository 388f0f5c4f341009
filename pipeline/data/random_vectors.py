"""Random inputs and targets for models that take no tokens: vectors, images, sound."""

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import torch
from pydantic import Field, PositiveInt

from pipeline.base.contracts import Batch, Corpus, CorpusRequest, Prepared, RandomInput, Sequences
from pipeline.base.files import digest_of


class RandomVectors(Corpus):
    """Random numbers in the shape of the model's inputs: normally distributed ones, and labels."""

    kind: ClassVar[str] = "vectors"

    num_sequences: PositiveInt = Field(default=64, le=65_536)
    """Examples to train on; each is made anew where it is used."""

    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the examples, which depend only on the seed and the shapes."""
        inputs, length = request.description.inputs, request.sequence_length
        num_held_out = max(1, self.num_sequences // 8)
        return Prepared(
            train=RandomExamples(inputs, length, self.num_sequences, request.seed * 2**32),
            held_out=RandomExamples(inputs, length, num_held_out, request.seed * 2**32 + self.num_sequences),
            vocabulary_size=0,
            source="random numbers",
            digest=digest_of([str((request.seed, self.num_sequences, length, inputs))])[:16],
        )


class RandomExamples(Sequences):
    """Examples that are made anew in each batch, each from a seed of its own; the last tensor has the targets."""

    def __init__(self, inputs: Sequence[RandomInput], length: int, count: int, first_seed: int) -> None:
        self._shapes = [(one, tuple(length if size is None else size for size in one.shape)) for one in inputs]
        self._count, self._first_seed = count, first_seed

    def __len__(self) -> int:
        return self._count

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return the tensors of these examples by name."""
        types = {one.name: torch.float32 if one.num_values is None else torch.int64 for one, _ in self._shapes}
        batch = {one.name: torch.empty(len(rows), *shape, dtype=types[one.name]) for one, shape in self._shapes}
        for number, row in enumerate(rows):
            generator = torch.Generator().manual_seed(self._first_seed + row)
            for one, _ in self._shapes:
                part = batch[one.name][number : number + 1]
                if one.num_values is None:
                    part.normal_(generator=generator)
                else:
                    part.random_(one.first, one.num_values, generator=generator)
        return batch

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the positions of the targets (one for an image), and the elements of the targets."""
        targets = batch[self._shapes[-1][0].name]
        return prod(targets.shape[:2]), targets.numel()
