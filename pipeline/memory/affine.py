"""Timelines of many micro-batch sizes from those of two, where every storage grows in proportion with the size."""

from dataclasses import replace
from itertools import groupby

from pipeline.memory.lifetimes import Life, Timeline

Known = tuple[int, Timeline]
"""A micro-batch size and its timeline."""


def told_by(first: Known, second: Known, size: int) -> Timeline | None:
    """Return the timeline at micro-batch `size`; None where the two differ in more than their sizes.

    Nothing is rounded: None too where a size between the two would not be whole.
    """
    (low, small), (high, large) = first, second
    if (small.events, small.spans) != (large.events, large.spans):
        return None
    lives = []
    for one, other in zip(small.lives, large.lives, strict=True):
        life = one if one == other else _grown(low, one, high, other, size)
        if life is None:
            return None
        lives.append(life)
    return replace(small, lives=tuple(lives))


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


def _grown(low: int, one: Life, high: int, other: Life, size: int) -> Life | None:
    if len(one.shape) != len(other.shape) or _besides(one) != _besides(other):
        return None
    grown = []
    for value, end in zip((one.num_bytes, *one.shape), (other.num_bytes, *other.shape), strict=True):
        growth, rest = divmod((end - value) * (size - low), high - low)
        if rest:
            return None
        grown.append(value + growth)
    return replace(one, num_bytes=grown[0], shape=tuple(grown[1:]))


def _besides(life: Life) -> tuple[object, ...]:
    return life.dtype, life.operator, life.module, life.category, life.born, life.died
