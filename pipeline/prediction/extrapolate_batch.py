"""Timelines of many micro-batch sizes from those of two, where every storage grows in proportion with the size."""

from dataclasses import dataclass, replace
from itertools import groupby

from pipeline.memory.timeline import Lifetime, Timeline

Known = tuple[int, Timeline]
"""A micro-batch size and its timeline."""


@dataclass(frozen=True)
class Growth:
    """What two micro-batch sizes say of all others."""

    size: int
    """The first of the two."""
    timeline: Timeline
    """Its timeline."""
    growing: tuple[tuple[int, int, tuple[int, ...]], ...]
    """Number of each life that differs, and by how many bytes and how much in each dimension for one sequence."""
    sequence_flops: int
    """For one sequence."""

    def extrapolated(self, size: int) -> Timeline:
        """Return the timeline at micro-batch `size`."""
        more, lives = size - self.size, list(self.timeline.lives)
        for number, num_bytes, dimensions in self.growing:
            life = lives[number]
            lives[number] = Lifetime(  # dataclasses.replace takes three times as long
                num_bytes=life.num_bytes + more * num_bytes,
                shape=tuple([value + more * growth for value, growth in zip(life.shape, dimensions, strict=True)]),
                dtype=life.dtype,
                operator=life.operator,
                module=life.module,
                category=life.category,
                born=life.born,
                died=life.died,
            )
        return replace(self.timeline, lives=tuple(lives), flops=self.timeline.flops + more * self.sequence_flops)


def growth_of(first: Known, second: Known) -> Growth | None:
    """Return how timelines grow from the first size to the second.

    None where the two differ in more than their sizes, or where what one sequence makes of the difference is not whole:
    nothing is rounded.
    """
    (size, timeline), (other_size, other_timeline) = first, second
    if (timeline.events, timeline.spans) != (other_timeline.events, other_timeline.spans):
        return None
    difference = other_size - size
    growing = []
    for number, (one, other) in enumerate(zip(timeline.lives, other_timeline.lives, strict=True)):
        if len(one.shape) != len(other.shape) or _besides(one) != _besides(other):
            return None
        growths = (other.num_bytes - one.num_bytes, *(b - a for a, b in zip(one.shape, other.shape, strict=True)))
        if any(growths):
            if any(growth % difference for growth in growths):
                return None
            num_bytes, *dimensions = (growth // difference for growth in growths)
            growing.append((number, num_bytes, tuple(dimensions)))
    flops, rest = divmod(other_timeline.flops - timeline.flops, difference)
    return None if rest else Growth(size, timeline, tuple(growing), flops)


def in_order(timeline: Timeline) -> Timeline:
    """Return the timeline with storages that die one right after the other in the order of their births.

    Autocast forgets its cast weights in an order that changes from run to run; what is alive afterwards does not.
    """
    events: list[int] = []
    for dead, together in groupby(timeline.events, lambda event: event < 0):
        run = list(together)
        events += sorted(run, reverse=True) if dead else run
    died = {-1 - event: number for number, event in enumerate(events) if event < 0}
    lives = tuple(
        life if life.died is not None and life.died == died.get(number) else replace(life, died=died.get(number))
        for number, life in enumerate(timeline.lives)
    )
    return replace(timeline, lives=lives, events=tuple(events))


def same_memory(one: Timeline, other: Timeline) -> bool:
    """Whether two timelines differ in nothing but when things happened."""
    return replace(one, seconds=()) == replace(other, seconds=())


def _besides(life: Lifetime) -> tuple[object, ...]:
    return life.dtype, life.operator, life.module, life.category, life.born, life.died
