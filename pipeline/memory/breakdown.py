"""Memory breakdowns of a timeline: the peak by category, module and tensor, and one optimizer step over time."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.base.by_key import summed
from pipeline.memory.timeline import CATEGORIES, Storage, Timeline

NUM_LARGEST = 15
"""Number of the largest tensors that a breakdown lists."""
NUM_MOMENTS = 400
"""Number of moments of an optimizer step of which the largest tensors are listed."""
NUM_LARGEST_THEN = 8
"""Number of the largest tensors of a moment."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The memory at the peak of a timeline."""

    peak_bytes: int
    step: int
    """Optimizer step, counted from 0."""
    phase: str
    operator: str
    """The operator whose allocation reached the peak."""
    module: str
    category_bytes: Mapping[str, int]
    module_bytes: Mapping[str, int]
    """By dotted name, the largest first."""
    largest: tuple[Storage, ...]


@dataclass(frozen=True, kw_only=True)
class ModuleMemory:
    """The memory of one module and one category at the peak."""

    module: str
    """Its dotted name."""
    category: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What was alive after one event of an optimizer step."""

    event: int
    """Number of the event in that step."""
    largest: tuple[int, ...]
    """The largest tensors alive, as places in the tensors of the StepMemory."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes alive after each event of one optimizer step."""

    seconds: tuple[float, ...]
    """From the first event."""
    category_bytes: Mapping[str, tuple[int, ...]]
    phases: tuple[tuple[str, float], ...]
    """Each phase and the time of its first event."""
    moments: tuple[Moment, ...]
    """The event with the most memory of each of NUM_MOMENTS stretches, or each event of a shorter step."""
    tensors: tuple[Storage, ...]
    """The tensors that are among the largest at one of the moments."""


def at_peak(timeline: Timeline) -> Breakdown:
    """Return the breakdown of the peak of a timeline, which must not be empty."""
    return at_event(timeline, timeline.peak_event)


def at_event(timeline: Timeline, event: int) -> Breakdown:
    """Return the breakdown of what is alive after an event of a timeline, as if it were the peak."""
    span, alive = timeline.span_of(event), timeline.alive(event)
    living = [timeline.storages[number] for number in alive]
    return Breakdown(
        peak_bytes=int(timeline.allocated_bytes_E[event]),
        step=span.step,
        phase=span.phase,
        operator=living[-1].operator,
        module=living[-1].module,
        category_bytes=dict(summed((one.category, one.num_bytes) for one in living).most_common()),
        module_bytes=dict(summed((one.module, one.num_bytes) for one in living).most_common()),
        largest=tuple(timeline.storages[number] for number in _largest(timeline, event, NUM_LARGEST)),
    )


def modules_at_peak(timeline: Timeline) -> tuple[ModuleMemory, ...]:
    """Return the memory at the peak of a timeline by module and category, the largest first."""
    living = (timeline.storages[number] for number in timeline.alive(timeline.peak_event))
    sizes = summed(((one.module, one.category), one.num_bytes) for one in living)
    return tuple(
        ModuleMemory(module=module, category=category, num_bytes=size)
        for (module, category), size in sizes.most_common()
    )


def course_of(timeline: Timeline, step: int | None = None) -> StepMemory:
    """Return the memory over optimizer step `step`, counted from 0, which must have been recorded; None: over all."""
    begins, ends = [span.begin for span in timeline.spans], timeline.ends
    of_step = [
        number
        for number, span in enumerate(timeline.spans)
        if step is None or (span.step, span.phase != "load") == (step, True)
    ]
    begin, end = begins[of_step[0]], ends[of_step[-1]]
    category_E = np.array([one.category for one in timeline.storages])[timeline.storage_E]
    changes = {category: np.where(category_E == category, timeline.change_E, 0) for category in CATEGORIES}
    start = timeline.seconds[begin]
    events = _highest(timeline, begin, end)
    largest = {event: _largest(timeline, event, NUM_LARGEST_THEN) for event in events}
    listed = dict.fromkeys(storage for found in largest.values() for storage in found)
    places = {storage: place for place, storage in enumerate(listed)}
    return StepMemory(
        moments=tuple(
            Moment(event=event - begin, largest=tuple(places[storage] for storage in largest[event]))
            for event in events
        ),
        tensors=tuple(timeline.storages[storage] for storage in places),
        seconds=tuple(moment - start for moment in timeline.seconds[begin:end]),
        category_bytes={name: tuple(np.cumsum(own)[begin:end].tolist()) for name, own in changes.items()},
        phases=tuple((timeline.spans[number].phase, timeline.seconds[begins[number]] - start) for number in of_step),
    )


def _highest(timeline: Timeline, begin: int, end: int) -> list[int]:
    """Return the event with the most memory of each of NUM_MOMENTS stretches between two events."""
    every = -(-(end - begin) // NUM_MOMENTS)
    starts = range(begin, end, every)
    return [start + int(timeline.allocated_bytes_E[start : min(start + every, end)].argmax()) for start in starts]


def _largest(timeline: Timeline, event: int, count: int) -> list[int]:
    """Return the numbers of the largest storages that are alive after an event, the largest first."""
    alive = timeline.alive(event)
    found: list[int] = alive[np.argsort(-timeline.num_bytes_N[alive], kind="stable")[:count]].tolist()
    return found
