"""An Experiment on fake tensors -> Prediction: how much memory it needs, before anything runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pipeline.contracts import Hardware, InvalidInputError, Prepared
from pipeline.experiment import Experiment
from pipeline.memory.allocator import OutOfMemoryError
from pipeline.memory.anatomy import Anatomy, at_peak
from pipeline.memory.cards import CONTEXT_BYTES
from pipeline.memory.lifetimes import Timeline
from pipeline.memory.replay import Allocation, Event, Free, replay
from pipeline.trace import trace


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a run of an Experiment on a device will need; None where such a device does not count it."""

    target: Hardware
    peak_allocated_bytes: int
    """As the device's allocator counts: on CUDA it rounds up."""
    peak_reserved_bytes: int | None
    peak_device_bytes: int | None
    """Reserved bytes and the CUDA context."""
    anatomy: Anatomy
    """The peak taken apart, before the allocator rounds: its phase, categories, modules and largest tensors."""
    phase_bytes: Mapping[str, int]
    """Greatest number of bytes alive in each phase, before the allocator rounds."""
    timeline: Timeline = field(repr=False, compare=False)
    expandable_segments: bool = False

    def fits(self, budget_bytes: int) -> bool:
        """Whether the run ends within a budget: on CUDA a cap on what is reserved, which gives back what is cached."""
        if self.peak_reserved_bytes is None or self.peak_allocated_bytes > budget_bytes:
            return self.peak_allocated_bytes <= budget_bytes
        if self.peak_reserved_bytes <= budget_bytes:
            return True
        try:
            replay(_events(self.timeline), cap_bytes=budget_bytes, expandable_segments=self.expandable_segments)
        except OutOfMemoryError:
            return False
        return True


def predict(
    experiment: Experiment,
    target: Hardware,
    prepared: Prepared | None = None,
    *,
    expandable_segments: bool = False,
    context_bytes: int = CONTEXT_BYTES,
) -> Prediction:
    """Take two optimizer steps of `experiment` without numbers, as if on `target`, and return what they would need.

    The corpus is read unless it is given; one example of it suffices, however large the batch. `context_bytes` is the
    CUDA context, which counts beside what torch reserves.

    Raises:
        InvalidInputError: the target cannot run it, or its work depends on the values of tensors.

    """
    reason = experiment.unsupported(target)
    if reason is not None:
        raise InvalidInputError(f"{reason}; choose another value")
    timeline = trace(experiment, target, prepared or experiment.read_corpus())
    on_card = target.kind == "cuda"
    peaks = replay(_events(timeline), expandable_segments=expandable_segments) if on_card else None
    return Prediction(
        target=target,
        peak_allocated_bytes=peaks.peak_allocated_bytes if peaks else max(timeline.allocated_bytes()),
        peak_reserved_bytes=peaks.peak_reserved_bytes if peaks else None,
        peak_device_bytes=peaks.peak_reserved_bytes + context_bytes if peaks else None,
        anatomy=at_peak(timeline),
        phase_bytes=_by_phase(timeline),
        timeline=timeline,
        expandable_segments=expandable_segments,
    )


def _events(timeline: Timeline) -> Iterator[Event]:
    """Yield the timeline as the allocator sees it."""
    for event in timeline.events:
        yield Allocation(event, timeline.lives[event].num_bytes) if event >= 0 else Free(-1 - event)


def _by_phase(timeline: Timeline) -> dict[str, int]:
    allocated = timeline.allocated_bytes()
    ends = [span.begin for span in timeline.spans[1:]] + [len(allocated)]
    greatest: dict[str, int] = {}
    for span, end in zip(timeline.spans, ends, strict=True):
        greatest[span.phase] = max([greatest.get(span.phase, 0), *allocated[span.begin : end]])
    return greatest
