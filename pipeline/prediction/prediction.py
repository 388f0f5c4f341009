"""Prediction: what a run is predicted to need of a device."""

from dataclasses import dataclass, field

from pipeline.base.results import limited_peak
from pipeline.memory.breakdown import Breakdown
from pipeline.memory.work import Work


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted memory and work of a run on a device; a value that the device does not have is None."""

    peak_allocated_bytes: int
    """As the device's allocator counts it: rounded up on CUDA."""
    peak_reserved_bytes: int | None = None
    peak_device_bytes: int | None = None
    """Reserved bytes and the CUDA context."""
    smallest_budget_bytes: int
    """What suffices: the peak that a budget limits, or less where CUDA's allocator then releases what it cached."""
    breakdown: Breakdown | None
    """Breakdown of the peak, before the allocator rounds; None if the run was not recorded."""
    micro_batch_size: int
    pass_work: Work
    """Work of one forward and backward pass at this micro-batch size, recomputation included.

    It is the mean over an optimizer step's passes, of which the first does not add to gradients. Where micro-batches
    differ in length, it is about that of a typical step.
    """
    update_work: Work
    """Work of an optimizer step after its passes: clipping and the optimizer."""
    last_pass_work: Work = field(default_factory=Work)
    """What the last of several passes has besides: what ranks exchange of the gradients of all passes."""
    num_tokens: float
    """Tokens of a typical optimizer step, without padding."""

    def mean_pass_work(self, num_passes: int) -> Work:
        """Return the work of a pass with its share of what the last one has besides."""
        return self.pass_work + self.last_pass_work / num_passes

    @property
    def peak_bytes(self) -> int:
        """The peak that a budget limits."""
        return limited_peak(self.peak_allocated_bytes, self.peak_reserved_bytes)

    def fits(self, budget_bytes: int) -> bool:
        """Whether the run stays within a budget: on CUDA a cap on reserved bytes, at which cached ones are released."""
        return self.smallest_budget_bytes <= budget_bytes

    def peak_within(self, budget_bytes: int) -> int | None:
        """Return the peak under a budget, as far as it is known; None if the run does not fit."""
        if not self.fits(budget_bytes):
            return None
        return self.peak_bytes if self.peak_bytes <= budget_bytes else self.smallest_budget_bytes
