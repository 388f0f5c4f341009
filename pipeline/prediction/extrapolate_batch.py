"""Extrapolation of a timeline to other micro-batch sizes.

Every storage grows linearly with the size, except some buffers inside operators, which are computed from their shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from pipeline.base.contracts import Hardware
from pipeline.memory.timeline import Lifetime, PhaseWork, Timeline
from pipeline.memory.work import Work, combined
from pipeline.prediction.extrapolate_depth import INDEX
from pipeline.prediction.reductions import buffer_bytes, has_formula

Recorded = tuple[int, Timeline]
"""A micro-batch size and its timeline."""


@dataclass(frozen=True)
class Growth:
    """The linear growth between the timelines of two micro-batch sizes."""

    size: int
    """The first of the two sizes."""
    timeline: Timeline
    """Its timeline."""
    growing: tuple[tuple[int, int, tuple[int, ...]], ...]
    """For each storage that grows: its index, its bytes per sequence, and its growth per sequence in each dimension."""
    sequence_work: tuple[Work, ...]
    """The growth of each phase's work per sequence."""

    def extrapolated(self, size: int, target: Hardware) -> Timeline:
        """Return the timeline at micro-batch size `size`."""
        more, lifetimes = size - self.size, list(self.timeline.lifetimes)
        for number, num_bytes, dimensions in self.growing:
            lifetime = lifetimes[number]
            shape = tuple([value + more * growth for value, growth in zip(lifetime.shape, dimensions, strict=True)])
            lifetimes[number] = Lifetime(  # dataclasses.replace takes three times as long
                num_bytes=buffer_bytes(lifetime, shape, target)
                if has_formula(lifetime)
                else lifetime.num_bytes + more * num_bytes,
                shape=shape,
                dtype=lifetime.dtype,
                operator=lifetime.operator,
                module=lifetime.module,
                category=lifetime.category,
                allocated_at=lifetime.allocated_at,
                freed_at=lifetime.freed_at,
            )
        work = tuple(
            replace(phase, work=phase.work + growth * more)
            for phase, growth in zip(self.timeline.work, self.sequence_work, strict=True)
        )
        return replace(self.timeline, lifetimes=tuple(lifetimes), work=work)

    def crosses(self, size: int, thresholds: Sequence[float]) -> bool:
        """Whether a storage that the layers may save reaches a threshold, in bytes, on the way to size `size`."""
        more, saved = size - self.size, _saved_by_layers(self.timeline) if thresholds else set()
        sizes = [(self.timeline.lifetimes[n].num_bytes, num_bytes) for n, num_bytes, _ in self.growing if n in saved]
        return any(old < threshold <= old + more * num_bytes for old, num_bytes in sizes for threshold in thresholds)


def _saved_by_layers(timeline: Timeline) -> set[int]:
    """Return the storages that may be saved by a layer: kept by a forward pass, and made before its last layer ends.

    Indices, in int64, are no activations.
    """
    ends = [*(span.begin for span in timeline.spans[1:]), len(timeline.events)]
    saved = set()
    for span, end in zip(timeline.spans, ends, strict=True):
        if span.phase != "forward":
            continue
        made = [event for event in timeline.events[span.begin : end] if event >= 0]
        last = max((number for number in made if INDEX.search(timeline.lifetimes[number].module)), default=-1)
        for number in made:
            one = timeline.lifetimes[number]
            if number <= last and one.category == "activations" and one.dtype != torch.int64:
                saved.add(number)
    return saved


def growth_of(first: Recorded, second: Recorded) -> Growth | None:
    """Return the growth from the first size to the second.

    It is None if the timelines differ in more than sizes, or if the growth per sequence is not an integer:
    nothing is rounded.
    """
    (size, timeline), (other_size, other_timeline) = first, second
    if (timeline.events, timeline.spans) != (other_timeline.events, other_timeline.spans):
        return None
    difference = other_size - size
    growing = []
    for number, (one, other) in enumerate(zip(timeline.lifetimes, other_timeline.lifetimes, strict=True)):
        if len(one.shape) != len(other.shape) or _fixed(one) != _fixed(other):
            return None
        num_bytes = 0 if has_formula(one) else other.num_bytes - one.num_bytes
        growths = (num_bytes, *(b - a for a, b in zip(one.shape, other.shape, strict=True)))
        if any(growths):
            if any(growth % difference for growth in growths):
                return None
            num_bytes, *dimensions = (growth // difference for growth in growths)
            growing.append((number, num_bytes, tuple(dimensions)))
    work = _growth_of_work(timeline.work, other_timeline.work, difference)
    return None if work is None else Growth(size, timeline, tuple(growing), work)


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
    for is_release, group in groupby(timeline.events, lambda event: event < 0):
        consecutive = list(group)
        events += sorted(consecutive, reverse=True) if is_release else consecutive
    freed_at = {-1 - event: number for number, event in enumerate(events) if event < 0}
    lifetimes = tuple(
        lifetime
        if lifetime.freed_at is not None and lifetime.freed_at == freed_at.get(number)
        else replace(lifetime, freed_at=freed_at.get(number))
        for number, lifetime in enumerate(timeline.lifetimes)
    )
    return replace(timeline, lifetimes=lifetimes, events=tuple(events))


def same_memory(one: Timeline, other: Timeline) -> bool:
    """Whether two timelines are equal except for the times of their events."""
    return replace(one, seconds=()) == replace(other, seconds=())


def _fixed(lifetime: Lifetime) -> tuple[object, ...]:
    return (
        lifetime.dtype,
        lifetime.operator,
        lifetime.module,
        lifetime.category,
        lifetime.allocated_at,
        lifetime.freed_at,
    )
