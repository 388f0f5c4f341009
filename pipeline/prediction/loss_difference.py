"""Where a timeline with another loss differs from the one with the model's own."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from pipeline.memory.timeline import Timeline
from pipeline.prediction.slots import Pass, Storages

LONGEST_END = 8
"""Number of storages at the end of a backward pass that may differ: sums of the gradients of a shared weight."""


class DifferentError(Exception):
    """Timelines differ where they must be equal."""


class Window(NamedTuple):
    """A range of storages around the end of a forward pass, or up to that of a backward pass."""

    begin: int
    anchor: int
    """The first storage after that pass."""
    end: int


@dataclass(frozen=True, eq=False)
class Difference:
    """Where a timeline with another loss differs from the one with the model's own."""

    own: Storages
    other: Storages
    own_windows: list[Window]
    other_windows: list[Window]
    slots: dict[int, int]
    """Slots in or right before the own windows -> those of the other loss in which the same is freed."""
    original: dict[int, int]
    """Storages outside of the windows, by their counterpart with the other loss."""


def difference_of(own: Timeline, other: Timeline) -> Difference | None:
    """Return the difference between two timelines; None if it is not two windows in each micro-batch."""
    one, another = Storages(own), Storages(other)
    try:
        passes = zip(one.passes, another.passes, strict=True)
        pairs = [pair for own_pass, other_pass in passes for pair in _windows(one, another, own_pass, other_pass)]
        original = _matched(one, another, pairs)
        slots = _slots(one, another, pairs, original)
    except (DifferentError, LookupError, ValueError):
        return None
    own_windows, other_windows = ([pair[number] for pair in pairs] for number in range(2))
    return Difference(one, another, own_windows, other_windows, slots, original)


def _windows(one: Storages, other: Storages, own_pass: Pass, other_pass: Pass) -> Iterator[tuple[Window, Window]]:
    """Yield what differs in a micro-batch: around the end of its forward pass, and at the end of its backward pass."""
    forward = _num_equal(one, other, range(own_pass.begin, own_pass.middle), range(other_pass.begin, other_pass.middle))
    equal = {
        ends: _num_equal(
            one,
            other,
            range(own_pass.end - 1 - ends[0], own_pass.middle - 1, -1),
            range(other_pass.end - 1 - ends[1], other_pass.middle - 1, -1),
        )
        for ends in sorted(product(range(LONGEST_END + 1), repeat=2), key=sum)
    }
    ends = max(equal, key=equal.__getitem__)
    own, another = (
        (
            Window(each.begin + forward, each.middle, each.end - end - equal[ends]),
            Window(each.end - end, each.end, each.end),
        )
        for each, end in zip((own_pass, other_pass), ends, strict=True)
    )
    yield from zip(own, another, strict=True)


def _num_equal(one: Storages, other: Storages, numbers: range, other_numbers: range) -> int:
    """Return how many storages are equal from the first ones on."""
    forms, other_forms = one.forms, other.forms
    pairs = enumerate(zip(numbers, other_numbers, strict=False))
    differing = (count for count, (a, b) in pairs if forms[a] != other_forms[b])
    return next(differing, min(len(numbers), len(other_numbers)))


def _matched(one: Storages, other: Storages, pairs: list[tuple[Window, Window]]) -> dict[int, int]:
    """Return the storages outside of the windows by their counterpart.

    Raises:
        DifferentError: there are others than these.

    """
    own_outside = _outside(len(one.slots_N), [pair[0] for pair in pairs])
    other_outside = _outside(len(other.slots_N), [pair[1] for pair in pairs])
    if [one.forms[number] for number in own_outside] != [other.forms[number] for number in other_outside]:
        raise DifferentError
    return dict(zip(other_outside, own_outside, strict=True))


def _slots(
    one: Storages, other: Storages, pairs: list[tuple[Window, Window]], original: dict[int, int]
) -> dict[int, int]:
    """Return the counterparts of the slots in or right before the windows.

    A forward pass ends in its last slot, with the loss of either.

    Raises:
        DifferentError: something is freed at another time outside of the windows, or the slots are contradictory.
        LookupError: something is freed in a window of one alone.

    """
    slots = {own.anchor - 1: another.anchor - 1 for own, another in pairs[::2]}
    own_ranges = {slot: n for n, (own, _) in enumerate(pairs) for slot in range(own.begin - 1, own.end)}
    other_ranges = {slot: n for n, (_, another) in enumerate(pairs) for slot in range(another.begin - 1, another.end)}
    original = original | {len(other.slots_N): len(one.slots_N)}
    for number, own_number in original.items():
        if own_number == len(one.slots_N):
            continue
        slot, own_slot = int(other.slots_N[number]), int(one.slots_N[own_number])
        if own_slot not in own_ranges and slot not in other_ranges:
            if original[slot] != own_slot:
                raise DifferentError
        elif own_ranges[own_slot] != other_ranges[slot] or slots.setdefault(own_slot, slot) != slot:
            raise DifferentError
    return slots


def _outside(num_storages: int, windows: list[Window]) -> list[int]:
    """Return the storages that lie in no window."""
    is_outside = np.ones(num_storages, bool)
    for window in windows:
        is_outside[window.begin : window.end] = False
    return np.flatnonzero(is_outside).tolist()
