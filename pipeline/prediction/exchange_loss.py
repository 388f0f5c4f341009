"""The timeline of a training with another loss, from three others.

What a loss does lies between the forward and the backward pass of the layers. So two timelines of one model whose
losses differ are equal but for two windows of storages in each micro-batch: around the end of the forward pass, and at
the end of the backward pass, where the gradients of a weight that head and embedding share are summed. If a third
timeline, of the model with other techniques inside its layers, has the windows of the first, then with those of the
second in their place it is the timeline with the other loss. Nothing is returned where this does not follow.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeline.memory.timeline import IntArray, Origin, Timeline
from pipeline.memory.work import combined
from pipeline.prediction.loss_difference import Difference, DifferentError, Window
from pipeline.prediction.slots import Chosen, Storages, events_of


def with_other_loss(timeline: Timeline, difference: Difference) -> Timeline | None:
    """Return `timeline` with the other loss of `difference`; None if it differs around the loss from its own."""
    try:
        return _exchanged(timeline, difference)
    except (DifferentError, LookupError, ValueError):
        return None


def _exchanged(timeline: Timeline, difference: Difference) -> Timeline:
    """Return the timeline with the storages of the other loss in its windows.

    Raises:
        DifferentError, LookupError: that does not follow.

    """
    mixed = Mixed.of(timeline, difference)
    own, other = mixed.storages.timeline, difference.other.timeline
    slots_M = mixed.slots_M()
    if (slots_M < np.arange(len(slots_M))).any():
        raise DifferentError
    events_E = events_of(slots_M)
    allocated_at = np.flatnonzero(events_E >= 0)
    works = zip(own.work, difference.own.timeline.work, other.work, strict=True)
    return Timeline(
        num_bytes_N=np.concatenate([own.num_bytes_N, other.num_bytes_N])[mixed.sources_M],
        shapes=Chosen((own.shapes, other.shapes), mixed.sources_M),
        origins=_chosen([*own.origins, *other.origins], mixed.sources_M),
        events_E=events_E,
        spans=tuple(
            replace(span, begin=int(allocated_at[mixed.begin(number)]))
            for span, number in zip(own.spans, mixed.storages.begins, strict=False)
        ),
        work=tuple(
            replace(phase, work=combined(lambda a, b, c: a + c - b, phase.work, one.work, another.work))
            for phase, one, another in works
        ),
    )


@dataclass(frozen=True, eq=False)
class Mixed:
    """The storages of a timeline with those of another loss in its windows; M counts them."""

    storages: Storages
    difference: Difference
    windows: list[Window]
    counterpart: dict[int, int]
    """Storages of the difference's own windows, and the one right before each, -> those of the timeline."""
    sources_M: IntArray
    """The number of each in the timeline, or the number with the other loss plus the number of the timeline's."""

    @classmethod
    def of(cls, timeline: Timeline, difference: Difference) -> "Mixed":
        """Find the windows in a timeline.

        Raises:
            DifferentError: one of them is not there.

        """
        storages, windows, sources, end = Storages(timeline), list[Window](), list[IntArray](), 0
        counterpart, num_own = dict[int, int](), len(storages.slots_N)
        anchors = [anchor for each in storages.passes for anchor in (each.middle, each.end)]
        for anchor, own, other in zip(anchors, difference.own_windows, difference.other_windows, strict=True):
            window = Window(anchor - own.anchor + own.begin, anchor, anchor + own.end - own.anchor)
            if window.begin < end:
                raise DifferentError
            windows.append(window)
            counterpart |= zip(range(own.begin - 1, own.end), range(window.begin - 1, window.end), strict=True)
            sources += [np.arange(end, window.begin), np.arange(other.begin, other.end) + num_own]
            end = window.end
        sources.append(np.arange(end, num_own))
        mixed = cls(storages, difference, windows, counterpart, np.concatenate(sources))
        for window in difference.own_windows:
            for number in range(window.begin, window.end):
                mixed._check(number)
        return mixed

    def _check(self, number: int) -> None:
        """Check that a storage of the own windows is also in the timeline."""
        own, slots_N = self.difference.own, self.difference.own.slots_N
        slot = int(self.storages.slots_N[self.counterpart[number]])
        inside = self.counterpart.get(int(slots_N[number]))
        is_left = slot not in self._places if inside is None else slot == inside
        is_kept = (slot == len(self.storages.slots_N)) == (slots_N[number] == len(slots_N))
        if not is_left or not is_kept or own.form(number) != self.storages.form(self.counterpart[number]):
            raise DifferentError

    @cached_property
    def _places(self) -> set[int]:
        """The slots in and right before the windows."""
        return set(self.counterpart.values())

    @cached_property
    def _new(self) -> dict[int, int]:
        """The new number of each storage."""
        return {source: number for number, source in enumerate(self.sources_M.tolist())}

    def of_other(self, number: int) -> int | None:
        """Return the new number of a storage of the other loss; None if it is in no window."""
        return self._new.get(len(self.storages.slots_N) + number)

    def begin(self, number: int) -> int:
        """Return the new number of the first storage of a phase."""
        for window, other in zip(self.windows, self.difference.other_windows, strict=True):
            if number == window.anchor:
                return self._new[window.begin - 1] + 1 + other.anchor - other.begin
        return self._new[number]

    def slots_M(self) -> IntArray:
        """Return the new slot in which each storage is freed.

        Raises:
            DifferentError, LookupError: it does not follow.

        """
        num_own, moved = len(self.storages.slots_N), self._moved()
        slots_M = moved[self.storages.slots_N[np.minimum(self.sources_M, num_own - 1)]]
        for number in np.flatnonzero(self.sources_M >= num_own).tolist():
            slots_M[number] = self._slot_of_other(int(self.sources_M[number]) - num_own, moved)
        if (slots_M < 0).any():
            raise LookupError
        return slots_M

    def _moved(self) -> IntArray:
        """Return the new slot of each slot of the timeline, -1 where it does not follow; the last one is for never."""
        moved = np.full(len(self.storages.slots_N) + 1, -1)
        moved[-1] = len(self.sources_M)
        is_own = self.sources_M < len(self.storages.slots_N)
        moved[self.sources_M[is_own]] = np.flatnonzero(is_own)
        windows = zip(self.difference.other_windows, self.windows, strict=True)
        right_before = {other.begin - 1: self._new[window.begin - 1] for other, window in windows}
        for own_slot, slot in self.counterpart.items():
            other_slot = self.difference.slots.get(own_slot)
            if other_slot is not None:
                inside = self.of_other(other_slot)
                moved[slot] = right_before[other_slot] if inside is None else inside
        return moved

    def _slot_of_other(self, number: int, moved: IntArray) -> int:
        """Return the new slot in which a storage of the other loss is freed."""
        slot = int(self.difference.other.slots_N[number])
        if slot == len(self.difference.other.slots_N):
            return len(self.sources_M)
        inside = self.of_other(slot)
        if inside is not None:
            return inside
        if slot + 1 in self._begins:
            return self._begins[slot + 1] - 1
        [found] = {int(moved[each]) for each in self._freed_in[self.difference.original[slot]]}
        return found

    @cached_property
    def _begins(self) -> dict[int, int]:
        """The new number of the first storage of each phase, by that with the other loss."""
        begins = zip(self.difference.other.begins, self.storages.begins, self.storages.timeline.spans, strict=False)
        return {other: self.begin(number) for other, number, _ in begins}

    @cached_property
    def _freed_in(self) -> dict[int, set[int]]:
        """The timeline's slots in which storages of its windows are freed, by the difference's own slot."""
        freed_in: dict[int, set[int]] = {}
        for window in self.difference.own_windows:
            for number in range(window.begin, window.end):
                slot = int(self.storages.slots_N[self.counterpart[number]])
                freed_in.setdefault(int(self.difference.own.slots_N[number]), set()).add(slot)
        return freed_in


def _chosen(origins: list[Origin], numbers: IntArray) -> tuple[Origin, ...]:
    return tuple([origins[number] for number in numbers.tolist()])
