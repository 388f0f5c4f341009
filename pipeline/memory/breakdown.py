"""Memory breakdowns of a timeline: the peak by category, module and tensor, and one optimizer step over time."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.memory.timeline import CATEGORIES, Lifetime, Timeline

NUM_LARGEST = 15
"""Number of the largest tensors that a breakdown lists."""


@dataclass(frozen=True, kw_only=True)
class LiveTensor:
    """A storage that is alive at the peak."""

    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    module: str
    """Dotted name of the innermost module that owns it or allocated it."""
    operator: str


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
    largest: tuple[LiveTensor, ...]


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes alive after each event of one optimizer step."""

    seconds: tuple[float, ...]
    """From the first event."""
    category_bytes: Mapping[str, tuple[int, ...]]
    phases: tuple[tuple[str, float], ...]
    """Each phase and the time of its first event."""


def at_peak(timeline: Timeline) -> Breakdown:
    """Return the breakdown of the peak of a timeline, which must not be empty."""
    allocated = timeline.allocated_bytes
    event = max(range(len(allocated)), key=allocated.__getitem__)
    span, alive = timeline.span_of(event), timeline.alive(event)
    last = max(alive, key=lambda lifetime: lifetime.allocated_at)
    return Breakdown(
        peak_bytes=allocated[event],
        step=span.step,
        phase=span.phase,
        operator=last.operator,
        module=last.module,
        category_bytes=_summed((lifetime.category, lifetime.num_bytes) for lifetime in alive),
        module_bytes=_summed((lifetime.module, lifetime.num_bytes) for lifetime in alive),
        largest=tuple(map(_described, sorted(alive, key=lambda lifetime: -lifetime.num_bytes)[:NUM_LARGEST])),
    )


def course_of(timeline: Timeline, step: int) -> StepMemory:
    """Return the memory over optimizer step `step`, counted from 0, which must have been recorded."""
    begins = [span.begin for span in timeline.spans] + [len(timeline.events)]
    of_step = [number for number, span in enumerate(timeline.spans) if span.step == step and span.phase != "load"]
    begin, end = begins[of_step[0]], begins[of_step[-1] + 1]
    alive = dict.fromkeys(CATEGORIES, 0)
    courses: dict[str, list[int]] = {category: [] for category in CATEGORIES}
    for number, event in enumerate(timeline.events[:end]):
        lifetime = timeline.lifetimes[event if event >= 0 else -1 - event]
        alive[lifetime.category] += lifetime.num_bytes if event >= 0 else -lifetime.num_bytes
        if number >= begin:
            for category, total in alive.items():
                courses[category].append(total)
    start = timeline.seconds[begin]
    return StepMemory(
        seconds=tuple(moment - start for moment in timeline.seconds[begin:end]),
        category_bytes={category: tuple(totals) for category, totals in courses.items()},
        phases=tuple((timeline.spans[number].phase, timeline.seconds[begins[number]] - start) for number in of_step),
    )


def _summed(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the sum for each name, the largest first."""
    totals: Counter[str] = Counter()
    for name, num_bytes in parts:
        totals[name] += num_bytes
    return dict(totals.most_common())


def _described(lifetime: Lifetime) -> LiveTensor:
    return LiveTensor(
        num_bytes=lifetime.num_bytes,
        shape=lifetime.shape,
        dtype=str(lifetime.dtype).removeprefix("torch."),
        category=lifetime.category,
        module=lifetime.module,
        operator=lifetime.operator,
    )
