"""Timelines of many micro-batch sizes from those of two, where every storage grows in proportion with the size."""

from dataclasses import dataclass, replace
from itertools import groupby

from pipeline.memory.lifetimes import Life, Timeline

Known = tuple[int, Timeline]
"""A micro-batch size and its timeline."""


@dataclass(frozen=True)
class Growth:
    """What two micro-batch sizes say of all others."""

    low: int
    """The smaller of the two sizes."""
    small: Timeline
    """Its timeline."""
    difference: int
    """Between the two sizes."""
    growing: tuple[tuple[int, tuple[int, ...]], ...]
    """Numbers of the lives that differ, and by how many bytes and how much in each dimension."""
    more_flops: int
    """By which the two differ."""

    def told(self, size: int) -> Timeline | None:
        """Return the timeline at micro-batch `size`; None where a size between the two would not be whole."""
        lives = list(self.small.lives)
        for number, growths in self.growing:
            life = lives[number]
            grown = []
            for value, growth in zip((life.num_bytes, *life.shape), growths, strict=True):
                more, rest = divmod(growth * (size - self.low), self.difference)
                if rest:
                    return None
                grown.append(value + more)
            lives[number] = Life(  # dataclasses.replace takes three times as long
                num_bytes=grown[0],
                shape=tuple(grown[1:]),
                dtype=life.dtype,
                operator=life.operator,
                module=life.module,
                category=life.category,
                born=life.born,
                died=life.died,
            )
        flops, rest = divmod(self.more_flops * (size - self.low), self.difference)
        return None if rest else replace(self.small, lives=tuple(lives), flops=self.small.flops + flops)


def growth_of(first: Known, second: Known) -> Growth | None:
    """Return how timelines grow from the first size to the second; None where these differ in more than their sizes."""
    (low, small), (high, large) = first, second
    if (small.events, small.spans) != (large.events, large.spans):
        return None
    growing = []
    for number, (one, other) in enumerate(zip(small.lives, large.lives, strict=True)):
        if len(one.shape) != len(other.shape) or _besides(one) != _besides(other):
            return None
        growths = (other.num_bytes - one.num_bytes, *(b - a for a, b in zip(one.shape, other.shape, strict=True)))
        if any(growths):
            growing.append((number, growths))
    return Growth(low, small, high - low, tuple(growing), large.flops - small.flops)


def told_by(first: Known, second: Known, size: int) -> Timeline | None:
    """Return the timeline at micro-batch `size`; None where the two differ in more than their sizes.

    Nothing is rounded: None too where a size between the two would not be whole.
    """
    growth = growth_of(first, second)
    return None if growth is None else growth.told(size)


def in_order(timeline: Timeline) -> Timeline:
    """Return the timeline with storages that die one right after the other in the order of their births.

    Autocast forgets its cast weights in an order that changes from run to run; what is alive afterwards does not.
    """
    events: list[int] = []
    for dead, together in groupby(timeline.events, lambda event: event < 0):
        run = list(together)
        events += sorted(run, reverse=True) if dead else run
    died = {-1 - event: number for number, event in enumerate(events) if event < 0}
    lives = tuple(replace(life, died=died.get(number)) for number, life in enumerate(timeline.lives))
    return replace(timeline, lives=lives, events=tuple(events))


def same_memory(one: Timeline, other: Timeline) -> bool:
    """Whether two timelines differ in nothing but when things happened."""
    return replace(one, seconds=()) == replace(other, seconds=())


def _besides(life: Life) -> tuple[object, ...]:
    return life.dtype, life.operator, life.module, life.category, life.born, life.died
