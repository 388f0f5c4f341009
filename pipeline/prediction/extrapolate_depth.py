"""Extrapolation of a timeline to deeper models: every further layer repeats the events of the layer before it."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import torch

from pipeline.memory.timeline import Lifetime, Span, Timeline

INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number in a module's dotted name, such as that of its layer."""
NUM_MATCHING = 8
"""Consecutive events that must match where the shallower timeline continues after a repetition."""

Block = tuple[int, int]
"""The index of the first event of a repetition in the deeper timeline, and the number of its events."""


class Kind(NamedTuple):
    """The properties of an event that are the same in every layer."""

    is_allocation: bool
    step: int
    """Optimizer step and phase of an allocation; 0 and empty for a release."""
    phase: str
    module: str
    """Dotted name with a placeholder for each number."""
    operator: str
    dtype: torch.dtype
    category: str
    num_dimensions: int


class Event(NamedTuple):
    """An event in a form that can be repeated."""

    kind: Kind
    numbers: tuple[int, ...]
    """What varies by layer: bytes and shape, or the index of the freed storage; then the numbers of the module."""


def extrapolate_depth(small: Timeline, large: Timeline, times: int) -> Timeline | None:
    """Return the timeline of a model with `times` as many additional layers over `small` as `large` has; without times.

    The additional events of `large` must be repetitions of the events right before them; else the result is None.
    Numbers are extrapolated linearly: from `small` to `large`, and from a block of events to its repetition.
    """
    shorter, longer = list(_events(small)), list(_events(large))
    blocks = _repetitions([event.kind for event in shorter], [event.kind for event in longer])
    if blocks is None:
        return None
    extrapolated: list[Event] = []
    same, done = iter(shorter), 0
    for begin, length in [*_away_from_the_first_layer(blocks, longer), (len(longer), 0)]:
        extrapolated += map(_extrapolate, islice(same, begin - done), longer[done:begin], [times] * (begin - done))
        one, other = longer[begin - length : begin], longer[begin : begin + length]
        start = extrapolated[len(extrapolated) - length :]
        for count in range(1, times + 1):
            extrapolated += [_linear(*events, count) for events in zip(start, one, other, strict=True)]
        done = begin + length
    return _timeline(extrapolated, small.flops + times * (large.flops - small.flops))


def _extrapolate(one: Event, other: Event, times: int) -> Event:
    return _linear(one, one, other, times)


def _linear(start: Event, one: Event, other: Event, times: int) -> Event:
    """Extrapolate `start` linearly by `times` times the difference between `one` and `other`."""
    numbers = zip(start.numbers, one.numbers, other.numbers, strict=True)
    return Event(start.kind, tuple([value + times * (b - a) for value, a, b in numbers]))


def _repetitions(shorter: Sequence[Kind], longer: Sequence[Kind]) -> list[Block] | None:
    """Return the repetitions that `longer` has and `shorter` has not; None where they differ otherwise."""
    blocks, here, there = [], 0, 0
    while there < len(longer):
        if here < len(shorter) and shorter[here] == longer[there]:
            here, there = here + 1, there + 1
            continue
        ahead = shorter[here : here + NUM_MATCHING]
        lengths = (
            length
            for length in range(1, min(there, len(longer) - there) + 1)
            if longer[there + length : there + length + len(ahead)] == ahead
            and longer[there : there + length] == longer[there - length : there]
        )
        length = next(lengths, None)
        if length is None:
            return None
        blocks.append((there, length))
        there += length
    return blocks if here == len(shorter) else None


def _away_from_the_first_layer(blocks: Sequence[Block], events: Sequence[Event]) -> list[Block]:
    """Return the blocks, moved to the earliest equivalent position where they go from the last layer to the first.

    A repetition can be cut at any event of its period, and the first layer differs from the others in its input.
    """
    moved: list[Block] = []
    for begin, length in blocks:
        end = sum(moved[-1]) if moved else 0
        if _descends(events[begin - length : begin], events[begin : begin + length]):
            while begin - 1 - length >= end and (
                events[begin - 1 - length].kind == events[begin - 1].kind == events[begin - 1 + length].kind
            ):
                begin -= 1
        moved.append((begin, length))
    return moved


def _descends(block: Sequence[Event], repetition: Sequence[Event]) -> bool:
    """Whether the layer numbers decrease from a block to its repetition."""
    return any(
        two < one
        for before, after in zip(block, repetition, strict=True)
        for one, two in zip(_module_numbers(before), _module_numbers(after), strict=True)
    )


def _module_numbers(event: Event) -> tuple[int, ...]:
    return event.numbers[1 + event.kind.num_dimensions if event.kind.is_allocation else 1 :]


def _events(timeline: Timeline) -> Iterator[Event]:
    begins = {span.begin: (span.step, span.phase) for span in timeline.spans}
    place = (0, "")
    for number, event in enumerate(timeline.events):
        place = begins.get(number, place)
        life = timeline.lives[event if event >= 0 else -1 - event]
        module, numbers = _parts(life.module)
        step, phase = place if event >= 0 else (0, "")
        kind = Kind(event >= 0, step, phase, module, life.operator, life.dtype, life.category, len(life.shape))
        yield Event(kind, (life.num_bytes, *life.shape, *numbers) if event >= 0 else (-1 - event, *numbers))


@lru_cache(maxsize=4096)
def _parts(module: str) -> tuple[str, tuple[int, ...]]:
    """Return a module's name with placeholders, and its numbers."""
    return INDEX.sub("{}", module), tuple(map(int, INDEX.findall(module)))


def _timeline(extrapolated: Sequence[Event], flops: int) -> Timeline | None:
    """Return the timeline of these events; None where an event frees a storage that is not alive."""
    lives: list[Lifetime] = []
    events: list[int] = []
    spans: list[Span] = []
    for kind, numbers in extrapolated:
        if kind.is_allocation:
            if not spans or (spans[-1].step, spans[-1].phase) != (kind.step, kind.phase):
                spans.append(Span(step=kind.step, phase=kind.phase, begin=len(events)))
            events.append(len(lives))
            lives.append(_life(kind, numbers, born=len(events) - 1))
            continue
        number = numbers[0]
        if not 0 <= number < len(lives) or lives[number].died is not None:
            return None
        lives[number].died = len(events)
        events.append(-1 - number)
    seconds = (0.0,) * len(events)
    return Timeline(lives=tuple(lives), events=tuple(events), seconds=seconds, spans=tuple(spans), flops=flops)


def _life(kind: Kind, numbers: Sequence[int], born: int) -> Lifetime:
    end = 1 + kind.num_dimensions
    return Lifetime(
        num_bytes=numbers[0],
        shape=tuple(numbers[1:end]),
        dtype=kind.dtype,
        operator=kind.operator,
        module=kind.module.format(*numbers[end:]),
        category=kind.category,
        born=born,
    )
