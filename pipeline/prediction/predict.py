"""An Experiment on fake tensors -> Prediction: its peak memory on a device that this machine need not have."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pipeline.base.contracts import Hardware, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.results import limited_peak
from pipeline.config.experiment import Experiment
from pipeline.memory.allocator import OutOfMemoryError
from pipeline.memory.blocks import LARGE_SEGMENT_BYTES
from pipeline.memory.breakdown import Breakdown, at_peak
from pipeline.memory.replay import AllocatorPeaks, Requests
from pipeline.memory.timeline import Timeline
from pipeline.memory.work import Work
from pipeline.prediction.cuda_context import context_bytes_of
from pipeline.prediction.trace import trace
from pipeline.runtime.environment import uses_expandable_segments
from pipeline.training.typical_step import typical_step


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted memory of a run on a device; a value that the device does not have is None."""

    target: Hardware
    peak_allocated_bytes: int
    """As the device's allocator counts it: rounded up on CUDA."""
    peak_reserved_bytes: int | None
    peak_device_bytes: int | None
    """Reserved bytes and the CUDA context."""
    breakdown: Breakdown
    """Breakdown of the peak, before the allocator rounds."""
    phase_bytes: Mapping[str, int]
    """Maximum of the bytes alive in each phase, before the allocator rounds."""
    micro_batch_size: int
    pass_work: Work
    """Work of one forward and backward pass at this micro-batch size, recomputation included.

    It is the mean over an optimizer step's passes, of which the first does not add to gradients. Where micro-batches
    differ in length, it is about that of a typical step.
    """
    update_work: Work
    """Work of an optimizer step after its passes: clipping and the optimizer."""
    num_tokens: float
    """Tokens of a typical optimizer step, without padding."""
    requests: Requests = field(repr=False)
    expandable_segments: bool = False
    _replayed: dict[int, int | None] = field(default_factory=dict, repr=False, compare=False)
    """The reserved peaks by the caps at which it was replayed; None where it does not fit."""

    @property
    def sequence_flops(self) -> float:
        """Floating-point operations for one sequence, recomputation included: the same for any micro-batch size."""
        return self.pass_work.flops / self.micro_batch_size

    @property
    def peak_bytes(self) -> int:
        """The peak that a budget limits."""
        return limited_peak(self.peak_allocated_bytes, self.peak_reserved_bytes)

    def fits(self, budget_bytes: int) -> bool:
        """Whether the run stays within a budget: on CUDA a cap on reserved bytes, at which cached ones are released."""
        if any(cap <= budget_bytes for cap, peak in self._replayed.items() if peak is not None):
            return True
        if any(cap >= budget_bytes for cap, peak in self._replayed.items() if peak is None):
            return False
        return self.peak_within(budget_bytes) is not None

    def peak_within(self, budget_bytes: int) -> int | None:
        """Return the peak of a run under this budget, at which cached bytes are released; None if it does not fit.

        Expandable segments may grow beyond the cap, which is over the budget too.
        """
        if self.peak_bytes <= budget_bytes:
            return self.peak_bytes
        if self.peak_reserved_bytes is None or self.peak_allocated_bytes > budget_bytes:
            return None
        if budget_bytes not in self._replayed:
            try:
                replayed = self.requests.replay(cap_bytes=budget_bytes, expandable_segments=self.expandable_segments)
                peak = replayed.peak_reserved_bytes
            except OutOfMemoryError:
                peak = None
            self._replayed[budget_bytes] = peak if peak is not None and peak <= budget_bytes else None
        return self._replayed[budget_bytes]


def predict(
    experiment: Experiment,
    target: Hardware,
    prepared: Prepared | None = None,
    *,
    expandable_segments: bool | None = None,
    context_bytes: int | None = None,
) -> Prediction:
    """Return the predicted memory of two optimizer steps of `experiment` on `target`.

    One example of the corpus suffices, however large the batch; the corpus is read unless `prepared` is given. Where
    micro-batches differ in length, the peak is that of the first two steps, which are padded to the longest one.
    `expandable_segments` overrides the environment variables of the run's process. `context_bytes` is the size of the
    CUDA context, by default that of context_bytes_of().

    Raises:
        InvalidInputError: the target does not support it, or it reads the values of tensors.

    """
    reason = experiment.unsupported(target)
    if reason is not None:
        raise InvalidInputError(reason)
    if context_bytes is None:
        context_bytes = context_bytes_of(target)
    if expandable_segments is None:
        expandable_segments = uses_expandable_segments(experiment)
    prepared = prepared or experiment.read_corpus()
    timeline, typical = trace(experiment, target, prepared), typical_step(experiment, prepared)
    pass_work = timeline.pass_work(experiment.accumulation_steps)
    requests = Requests.of(timeline, experiment.settings.num_steps)
    peaks = (
        on_card(requests, target.memory_bytes - context_bytes, expandable_segments) if target.kind == "cuda" else None
    )
    return Prediction(
        target=target,
        peak_allocated_bytes=peaks.peak_allocated_bytes if peaks else int(timeline.allocated_bytes_E.max()),
        peak_reserved_bytes=peaks.peak_reserved_bytes if peaks else None,
        peak_device_bytes=peaks.peak_reserved_bytes + context_bytes if peaks else None,
        breakdown=at_peak(timeline),
        phase_bytes=_by_phase(timeline),
        micro_batch_size=experiment.micro_batch_size,
        pass_work=pass_work.shortened(typical.share, typical.square_share),
        update_work=timeline.update_work,
        num_tokens=typical.num_tokens,
        requests=requests,
        expandable_segments=expandable_segments,
    )


def on_card(requests: Requests, free_bytes: int, expandable_segments: bool) -> AllocatorPeaks:
    """Return the peaks on a card with so much memory, where cached segments are released before it is full.

    Where the requests do not fit, the peaks are those on a card of any size.
    """
    peaks = requests.replay(expandable_segments=expandable_segments)
    beyond_bytes = LARGE_SEGMENT_BYTES if expandable_segments else 0  # pages may go beyond the cap
    if peaks.peak_reserved_bytes <= free_bytes or requests.least_bytes > free_bytes + beyond_bytes:
        return peaks
    try:
        return requests.replay(cap_bytes=free_bytes, expandable_segments=expandable_segments)
    except OutOfMemoryError:
        return peaks


def _by_phase(timeline: Timeline) -> dict[str, int]:
    greatest = np.maximum.reduceat(timeline.allocated_bytes_E, [span.begin for span in timeline.spans])
    phases: dict[str, int] = {}
    for span, num_bytes in zip(timeline.spans, greatest.tolist(), strict=True):
        phases[span.phase] = max(phases.get(span.phase, 0), num_bytes)
    return phases
