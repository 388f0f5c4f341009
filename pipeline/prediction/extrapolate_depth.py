"""Timelines of deep models from those of two shallow ones, where every further layer does the same over again."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import torch

from pipeline.memory.timeline import Lifetime, Span, Timeline

INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number among the names that make a module's dotted name: that of its layer, for one."""
NUM_CERTAIN = 8
"""Events in a row that must be alike where the shallower timeline is said to go on."""

Block = tuple[int, int]
"""The number of the first event that only the deeper timeline has, and how many follow each other."""


class Kind(NamedTuple):
    """What of an event is the same in every layer."""

    is_birth: bool
    step: int
    """Optimizer step and phase of a birth; a death leaves them out."""
    phase: str
    module: str
    """Name with a hole for each number."""
    operator: str
    dtype: torch.dtype
    category: str
    num_dimensions: int


class Moment(NamedTuple):
    """An event, in a form that can be repeated."""

    kind: Kind
    numbers: tuple[int, ...]
    """What counts on from layer to layer: bytes and shape of a birth, whose death it is; and the module's numbers."""


def extrapolate_depth(small: Timeline, large: Timeline, times: int) -> Timeline | None:
    """Return the timeline of a model that has `times` as many layers more than `small` as `large` has; without seconds.

    What `large` has more must stand in blocks that repeat what is right before them; None where it does not. Numbers go
    on as they went: from `small` to `large` at the same place, and from a block to its repetition.
    """
    shorter, longer = list(_moments(small)), list(_moments(large))
    blocks = _repetitions([moment.kind for moment in shorter], [moment.kind for moment in longer])
    if blocks is None:
        return None
    extrapolated: list[Moment] = []
    same, done = iter(shorter), 0
    for begin, length in [*_away_from_the_first_layer(blocks, longer), (len(longer), 0)]:
        extrapolated += map(_further, islice(same, begin - done), longer[done:begin], [times] * (begin - done))
        one, other = longer[begin - length : begin], longer[begin : begin + length]
        start = extrapolated[len(extrapolated) - length :]
        for count in range(1, times + 1):
            extrapolated += [_stepped(*moments, count) for moments in zip(start, one, other, strict=True)]
        done = begin + length
    return _timeline(extrapolated, small.flops + times * (large.flops - small.flops))


def _further(one: Moment, other: Moment, times: int) -> Moment:
    return _stepped(one, one, other, times)


def _stepped(start: Moment, one: Moment, other: Moment, times: int) -> Moment:
    """Return `start` after so many times the way from `one` to `other`."""
    numbers = zip(start.numbers, one.numbers, other.numbers, strict=True)
    return Moment(start.kind, tuple([value + times * (b - a) for value, a, b in numbers]))


def _repetitions(shorter: Sequence[Kind], longer: Sequence[Kind]) -> list[Block] | None:
    """Return what `longer` has more than `shorter`; None where that is not made of repetitions alone."""
    blocks, here, there = [], 0, 0
    while there < len(longer):
        if here < len(shorter) and shorter[here] == longer[there]:
            here, there = here + 1, there + 1
            continue
        ahead = shorter[here : here + NUM_CERTAIN]
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


def _away_from_the_first_layer(blocks: Sequence[Block], moments: Sequence[Moment]) -> list[Block]:
    """Return the blocks as early as they can stand where they go from the last layer to the first.

    A repetition may be cut out anywhere among its like, and the first layer is unlike the others in where its input
    comes from.
    """
    moved: list[Block] = []
    for begin, length in blocks:
        end = sum(moved[-1]) if moved else 0
        if _descends(moments[begin - length : begin], moments[begin : begin + length]):
            while begin - 1 - length >= end and (
                moments[begin - 1 - length].kind == moments[begin - 1].kind == moments[begin - 1 + length].kind
            ):
                begin -= 1
        moved.append((begin, length))
    return moved


def _descends(block: Sequence[Moment], repetition: Sequence[Moment]) -> bool:
    """Whether the modules' numbers become smaller from a block to its repetition."""
    return any(
        two < one
        for before, after in zip(block, repetition, strict=True)
        for one, two in zip(_of_module(before), _of_module(after), strict=True)
    )


def _of_module(moment: Moment) -> tuple[int, ...]:
    return moment.numbers[1 + moment.kind.num_dimensions if moment.kind.is_birth else 1 :]


def _moments(timeline: Timeline) -> Iterator[Moment]:
    begins = {span.begin: (span.step, span.phase) for span in timeline.spans}
    place = (0, "")
    for number, event in enumerate(timeline.events):
        place = begins.get(number, place)
        life = timeline.lives[event if event >= 0 else -1 - event]
        module, numbers = _parts(life.module)
        step, phase = place if event >= 0 else (0, "")
        kind = Kind(event >= 0, step, phase, module, life.operator, life.dtype, life.category, len(life.shape))
        yield Moment(kind, (life.num_bytes, *life.shape, *numbers) if event >= 0 else (-1 - event, *numbers))


@lru_cache(maxsize=4096)
def _parts(module: str) -> tuple[str, tuple[int, ...]]:
    """Return a module's name with holes, and the numbers that belong there."""
    return INDEX.sub("{}", module), tuple(map(int, INDEX.findall(module)))


def _timeline(moments: Sequence[Moment], flops: int) -> Timeline | None:
    """Return what these moments are; None where a storage would die that does not live."""
    lives: list[Lifetime] = []
    events: list[int] = []
    spans: list[Span] = []
    for kind, numbers in moments:
        if kind.is_birth:
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
