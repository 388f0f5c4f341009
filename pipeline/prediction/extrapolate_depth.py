"""Extrapolation of a timeline to more layers, which a recording with few more layers proves.

What grows with the layers is in the layers, which are repeated; or it belongs to no layer, such as the norms of all
gradients, and grows linearly. The proof counts for other micro-batch sizes too: there, what belongs to no layer must be
what it was in the proof.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from pipeline.memory.timeline import PhaseWork, Shape, Span, Timeline
from pipeline.memory.work import Work, combined, work_of
from pipeline.prediction.buffer_formulas import has_formula
from pipeline.prediction.layers import Layers
from pipeline.prediction.repetition import Repetition, repetition_of

ONCE_A_STEP = ("load", "optimizer")
"""Phases whose work does not depend on the micro-batch size."""
Key = tuple[object, ...]
"""A storage by step, phase, module, operator, and its number among those for which these are the same."""
Phase = tuple[int, str, int]
"""An optimizer step, a phase in it, and its number among those of the same name."""
Part = TypeVar("Part", Span, PhaseWork)


class Grown(NamedTuple):
    """A storage of no layer that grows with the number of layers."""

    num_bytes: int
    shape: Shape
    more_bytes: int
    """Growth per period of layers."""
    more_shape: Shape


class GrownWork(NamedTuple):
    """The work of a phase outside of the repeated layers' storages, where it grows with the number of layers."""

    work: Work
    """All of the phase, in the shallow model."""
    more: Work
    """Growth per period of layers."""


@dataclass(frozen=True)
class Depth:
    """How a timeline follows from that of a model with few layers, by a recording with one period of layers more."""

    layers: Layers
    counts_by_storage: bool
    """Whether the work of the shallow model was recorded by storage."""
    storages: Mapping[Key, Grown]
    work: Mapping[Phase, GrownWork]

    @classmethod
    def of(cls, shallow: Timeline, deeper: Timeline, layers: Layers) -> "Depth | None":
        """Return it if the shallow model's layers, repeated, are what was recorded of the deeper one, else None."""
        again = repetition_of(shallow, replace(layers, num_more=layers.period))
        phases, deeper_phases = dict(_numbered(shallow.work)), dict(_numbered(deeper.work))
        if again is None or list(phases) != list(deeper_phases):
            return None
        storages, of_layers = _grown_storages(again, shallow, deeper), _work_of_period(again, shallow)
        work = {}
        for phase, one in phases.items():
            more = combined(lambda a, b, c: b - a - c, one.work, deeper_phases[phase].work, of_layers[phase])
            if more != Work():
                work[phase] = GrownWork(one.work, more)
        return None if storages is None else cls(layers, bool(shallow.storage_work), storages, work)

    @property
    def holds_at_other_sizes(self) -> bool:
        """Whether nothing that grows outside of the repeated layers is in a phase of a micro-batch."""
        return all(phase in ONCE_A_STEP for _, phase, *_ in (*self.storages, *self.work))

    def timeline(self, shallow: Timeline) -> Timeline | None:
        """Return the timeline of the deep model from that of the shallow one; None if it does not follow.

        What grows outside of the repeated layers must be in the shallow timeline as it was in the proof, and the work
        recorded by storage if it was.
        """
        if self.counts_by_storage != bool(shallow.storage_work):
            return None
        deep, phases = repetition_of(shallow, self.layers), dict(_numbered(shallow.work))
        if deep is None or any(
            phase not in phases or phases[phase].work != one.work for phase, one in self.work.items()
        ):
            return None
        timeline, num_periods = deep.timeline(shallow), self.layers.num_more // self.layers.period
        places, shapes = {number: place for place, number in enumerate(deep.source_N.tolist())}, list(timeline.shapes)
        numbers = {key: number for number, key in enumerate(_keys(shallow)) if key in self.storages}
        for key, (num_bytes, shape, more_bytes, more_shape) in self.storages.items():
            number = numbers.get(key)
            if number is None or (int(shallow.num_bytes_N[number]), shallow.shapes[number]) != (num_bytes, shape):
                return None
            timeline.num_bytes_N[places[number]] += num_periods * more_bytes
            shapes[places[number]] = tuple([a + num_periods * b for a, b in zip(shape, more_shape, strict=True)])
        more = _work_of_period(deep, shallow)
        for phase, one in self.work.items():
            more[phase] += one.more
        work = tuple(replace(one, work=one.work + more[phase] * num_periods) for phase, one in phases.items())
        return replace(timeline, shapes=tuple(shapes), work=work)


def _grown_storages(again: Repetition, shallow: Timeline, deeper: Timeline) -> dict[Key, Grown] | None:
    """Return the storages of no layer that are larger in the deeper timeline.

    It is None if that timeline differs in anything else from the repetition `again` of the shallow one.
    """
    expected = again.timeline(shallow)
    if (expected.spans, expected.origins) != (deeper.spans, tuple(deeper.origins)):
        return None
    if not np.array_equal(expected.events_E, deeper.events_E):
        return None
    differing = set(np.flatnonzero(expected.num_bytes_N != deeper.num_bytes_N).tolist())
    pairs = enumerate(zip(expected.shapes, deeper.shapes, strict=True))
    differing |= {number for number, (one, other) in pairs if one != other}
    grown, keys = {}, list(_keys(shallow))
    for number in differing:
        (num_bytes, shape), (more_bytes, more_shape) = (
            (int(one.num_bytes_N[number]), one.shapes[number]) for one in (expected, deeper)
        )
        if again.layers[number] is not None or len(shape) != len(more_shape) or has_formula(expected.origins[number]):
            return None
        growths = tuple([b - a for a, b in zip(shape, more_shape, strict=True)])
        grown[keys[int(again.source_N[number])]] = Grown(num_bytes, shape, more_bytes - num_bytes, growths)
    return grown


def _work_of_period(deep: Repetition, shallow: Timeline) -> dict[Phase, Work]:
    """Return the work of the storages that are repeated, in each phase: none where it was not recorded by storage."""
    is_repeated_N = np.bincount(deep.source_N) > 1
    firsts_S = np.searchsorted(shallow.allocated_at_N, [*(span.begin for span in shallow.spans), len(shallow.events_E)])
    work = {phase: Work() for phase, _ in _numbered(shallow.work)}
    for (phase, _), (first, end) in zip(_numbered(shallow.spans), pairwise(firsts_S.tolist()), strict=True):
        repeated = first + np.flatnonzero(is_repeated_N[first:end])
        if phase in work:
            work[phase] = work_of({kind: int(each_N[repeated].sum()) for kind, each_N in shallow.storage_work.items()})
    return work


def _keys(timeline: Timeline) -> Iterator[Key]:
    """Yield the key of each storage."""
    counts = Counter[Key]()
    firsts_S = np.searchsorted(timeline.allocated_at_N, [span.begin for span in timeline.spans])
    num_storages_S = np.diff(firsts_S, append=len(timeline.origins))
    spans = (span for span, count in zip(timeline.spans, num_storages_S.tolist(), strict=True) for _ in range(count))
    for span, origin in zip(spans, timeline.origins, strict=True):
        key = span.step, span.phase, origin.module, origin.operator
        counts[key] += 1
        yield *key, counts[key]


def _numbered(parts: Iterable[Part]) -> Iterator[tuple[Phase, Part]]:
    """Yield each part with its phase."""
    counts = Counter[tuple[int, str]]()
    for part in parts:
        counts[part.step, part.phase] += 1
        yield (part.step, part.phase, counts[part.step, part.phase]), part
