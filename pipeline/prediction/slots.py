"""Timelines as storages and the slots in which they are freed, for deriving one timeline from others.

A slot is the storage after whose allocation, and before the next one's, something is freed. N counts storages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipeline.memory.timeline import IntArray, Origin, Shape, Timeline


class Pass(NamedTuple):
    """The storages of one micro-batch: those before `middle` are allocated in its forward pass."""

    begin: int
    middle: int
    end: int


@dataclass(frozen=True, eq=False)
class Storages:
    """The storages of a timeline and the slots in which they are freed."""

    timeline: Timeline

    @cached_property
    def slots_N(self) -> IntArray:
        """The slot in which each storage is freed; N where it is never freed."""
        slots_N = np.searchsorted(self.timeline.allocated_at_N, self.timeline.freed_at_N) - 1
        slots_N[self.timeline.freed_at_N == len(self.timeline.events_E)] = len(slots_N)
        return slots_N

    @cached_property
    def begins(self) -> list[int]:
        """The first storage of each phase, and the number of all."""
        begins = [*(span.begin for span in self.timeline.spans), len(self.timeline.events_E)]
        return [int(number) for number in np.searchsorted(self.timeline.allocated_at_N, begins)]

    @cached_property
    def passes(self) -> list[Pass]:
        """The storages of each micro-batch."""
        phases = [span.phase for span in self.timeline.spans]
        return [
            Pass(*self.begins[number : number + 3])
            for number in range(len(phases) - 1)
            if phases[number : number + 2] == ["forward", "backward"]
        ]

    @cached_property
    def forms(self) -> list[tuple[int, Shape, Origin]]:
        """Size, shape and origin of each storage."""
        timeline = self.timeline
        return list(zip(timeline.num_bytes_N.tolist(), timeline.shapes, timeline.origins, strict=True))

    def form(self, number: int) -> tuple[int, Shape, Origin]:
        """Return size, shape and origin of a storage."""
        return int(self.timeline.num_bytes_N[number]), self.timeline.shapes[number], self.timeline.origins[number]


@dataclass(frozen=True)
class Chosen(Sequence[Shape]):
    """Shapes of several timelines, each found when it is asked for."""

    parts: tuple[Sequence[Shape], ...]
    numbers: IntArray
    """For each its index among all of the parts."""

    def __len__(self) -> int:
        """Return the number of shapes."""
        return len(self.numbers)

    def __getitem__(self, number: int) -> Shape:  # type: ignore[override]
        """Return one shape."""
        index = int(self.numbers[number])
        for part in self.parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(number)


def events_of(slots_M: IntArray) -> IntArray:
    """Return the events of storages that are freed in these slots; those of one slot in the order of allocation."""
    number_M = np.arange(len(slots_M))
    freed = number_M[slots_M < len(slots_M)]
    moments = np.concatenate([number_M, slots_M[freed]])
    order = np.lexsort((np.concatenate([number_M, freed]), np.repeat([0, 1], [len(number_M), len(freed)]), moments))
    events: IntArray = np.concatenate([number_M, -1 - freed])[order]
    return events
