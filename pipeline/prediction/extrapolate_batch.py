"""Extrapolation of a timeline to other micro-batch sizes.

Every storage grows linearly with the size. N counts storages.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
import torch

from pipeline.memory.timeline import IntArray, PhaseWork, Shape, Timeline
from pipeline.memory.work import Work, combined

INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number in a module's dotted name."""
Recorded = tuple[int, Timeline]
"""A micro-batch size and its timeline."""


@dataclass(frozen=True)
class GrownShapes(Sequence[Shape]):
    """The shapes of a timeline's storages at a larger micro-batch size, each computed when it is asked for."""

    shapes: Sequence[Shape]
    growing: Mapping[int, Shape]
    """Growth per sequence in each dimension, by the index of the storage."""
    num_more: int
    """Sequences more than in `shapes`."""

    def __len__(self) -> int:
        """Return the number of storages."""
        return len(self.shapes)

    def __getitem__(self, number: int) -> Shape:  # type: ignore[override]
        """Return the shape of one storage."""
        shape, growths = self.shapes[number], self.growing.get(number)
        if growths is None:
            return shape
        return tuple([value + self.num_more * growth for value, growth in zip(shape, growths, strict=True)])


@dataclass(frozen=True, eq=False)
class Growth:
    """The linear growth between the timelines of two micro-batch sizes."""

    size: int
    """The first of the two sizes."""
    timeline: Timeline
    """Its timeline."""
    more_bytes_N: IntArray
    """Growth of each storage per sequence, in bytes."""
    growing: Mapping[int, Shape]
    """Growth per sequence in each dimension of the storages whose shapes grow."""
    sequence_work: tuple[Work, ...]
    """The growth of each phase's work per sequence."""

    def extrapolated(self, size: int) -> Timeline:
        """Return the timeline at micro-batch size `size`."""
        more = size - self.size
        shapes = GrownShapes(self.timeline.shapes, self.growing, more)
        num_bytes_N = self.timeline.num_bytes_N + more * self.more_bytes_N
        work = tuple(
            replace(phase, work=phase.work + growth * more)
            for phase, growth in zip(self.timeline.work, self.sequence_work, strict=True)
        )
        return replace(self.timeline, num_bytes_N=num_bytes_N, shapes=shapes, work=work, storage_work={})

    def crosses(self, size: int, thresholds: Sequence[float]) -> bool:
        """Whether a storage that the layers may save reaches a threshold, in bytes, on the way to size `size`."""
        if not thresholds:
            return False
        old = self.timeline.num_bytes_N[self._saved_by_layers]
        new = old + (size - self.size) * self.more_bytes_N[self._saved_by_layers]
        return any(((old < threshold) & (threshold <= new)).any() for threshold in thresholds)

    @cached_property
    def _saved_by_layers(self) -> IntArray:
        """The storages that may be saved by a layer: kept by a forward pass, and made before its last layer ends.

        Indices, in int64, are no activations.
        """
        origins, saved = self.timeline.origins, list[int]()
        begins = [span.begin for span in self.timeline.spans] + [len(self.timeline.events_E)]
        firsts_S = np.searchsorted(self.timeline.allocated_at_N, begins)
        for span, (first, end) in zip(self.timeline.spans, pairwise(firsts_S.tolist()), strict=True):
            made = range(first, end) if span.phase == "forward" else ()
            last = max((number for number in made if INDEX.search(origins[number].module)), default=-1)
            kept = [number for number in made if number <= last and origins[number].category == "activations"]
            saved += [number for number in kept if origins[number].dtype != torch.int64]
        return np.array(saved, np.int64)


def growth_of(first: Recorded, second: Recorded) -> Growth | None:
    """Return the growth from the first size to the second.

    It is None if the timelines differ in more than sizes, or if the growth per sequence is not an integer:
    nothing is rounded.
    """
    (size, one), (other_size, other) = first, second
    if (one.spans, tuple(one.origins)) != (other.spans, tuple(other.origins)):
        return None
    if not np.array_equal(one.events_E, other.events_E):
        return None
    difference = other_size - size
    growing = {}
    for number, (shape, other_shape) in enumerate(zip(one.shapes, other.shapes, strict=True)):
        if shape != other_shape:
            if len(shape) != len(other_shape):
                return None
            growing[number] = tuple([b - a for a, b in zip(shape, other_shape, strict=True)])
    more_bytes_N = other.num_bytes_N - one.num_bytes_N
    if (more_bytes_N % difference).any() or any(more % difference for growths in growing.values() for more in growths):
        return None
    work = _growth_of_work(one.work, other.work, difference)
    if work is None:
        return None
    per_sequence = {number: tuple(more // difference for more in growths) for number, growths in growing.items()}
    return Growth(size, one, more_bytes_N // difference, per_sequence, work)


def _growth_of_work(
    first: tuple[PhaseWork, ...], second: tuple[PhaseWork, ...], difference: int
) -> tuple[Work, ...] | None:
    """Return the growth of each phase's work per sequence; None if the phases differ, or if it is not an integer."""
    if [(one.step, one.phase) for one in first] != [(one.step, one.phase) for one in second]:
        return None
    growths = [combined(lambda a, b: b - a, one.work, other.work) for one, other in zip(first, second, strict=True)]
    if any(combined(lambda amount: amount % difference, growth) != growth * 0 for growth in growths):
        return None
    return tuple(combined(lambda amount: amount // difference, growth) for growth in growths)


def with_sorted_releases(timeline: Timeline) -> Timeline:
    """Return the timeline with consecutive releases sorted by allocation.

    Autocast frees its cast weights in an order that varies from run to run.
    """
    events: list[int] = []
    for is_release, group in groupby(timeline.events_E.tolist(), lambda event: event < 0):
        consecutive = list(group)
        events += sorted(consecutive, reverse=True) if is_release else consecutive
    return replace(timeline, events_E=np.array(events, np.int64))
