"""The measurements and the outcome of a run."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

Size = TypeVar("Size")


def limited_peak(allocated: Size, reserved: Size | None) -> Size:
    """Return the peak that a budget limits: the reserved memory on CUDA, the allocated memory on a CPU."""
    return allocated if reserved is None else reserved


class Outcome(StrEnum):
    """How a run ended."""

    OK = "ok"
    OVER_BUDGET = "over_budget"
    OUT_OF_MEMORY = "out_of_memory"
    DIVERGED = "diverged"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"

    @property
    def completed(self) -> bool:
        """Whether all optimizer steps were taken."""
        return self in (Outcome.OK, Outcome.OVER_BUDGET)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The measurements of one optimizer step."""

    step: int
    """Counted from 0."""
    loss: float
    grad_norm: float
    """Before clipping; infinite or NaN in a step that the gradient scaler skipped, NaN where no gradients were left."""
    seconds: float
    tokens: int | None = None
    """Real tokens, padding left out; None of a command, whose tokens are not counted."""
    positions: int
    """The same with padding; of a command, its sequences."""
    learning_rate: float
    loss_scale: float | None = None
    """The gradient scaler's scale of this step; None without one."""
    skipped: bool
    """Whether the gradient scaler left the weights as they were."""
    reserved_bytes: int | None = None
    """What the caching allocator held at its end; None on a CPU."""


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """Bytes in live tensors at the end of a phase."""

    step: int
    """Optimizer step, counted from 0."""
    phase: str
    """`load`, `forward` and `backward` (of the last micro-batch), or `optimizer`."""
    allocated_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Peaks over the run so far; None if the device does not report them."""

    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None = None
    peak_device_bytes: int | None = None
    peak_process_bytes: int
    """Resident host memory of the process."""
    allocation_retries: int | None = None
    phases: tuple[PhaseMemory, ...] = ()
    peak_evaluation_bytes: int | None = None
    """Allocated bytes while held-out documents were evaluated; part of the peaks above."""

    @property
    def peak_bytes(self) -> int | None:
        """The peak that a budget limits."""
        return limited_peak(self.peak_allocated_bytes, self.peak_reserved_bytes)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Measurements taken after the last optimizer step of a run."""

    eval_loss: float | None = None
    gradient_underflow_percent: float | None = None
    """Share of the last window's non-zero gradient elements that are zero in fp16 without scaling."""
    block_forwards_per_step: int | None = None
    """Forward passes through layers in one optimizer step, recomputation included; None of a command."""
    passes_per_micro_batch: float | None = None
    """Of a command: backward passes for each micro-batch of its size; None if that is not known."""
    number_formats: tuple[str, ...] = ()
    """Of a command: the formats in which it was seen to compute."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one run, whatever its outcome."""

    outcome: Outcome
    detail: str | None = None
    """The reason if the run failed, in a few lines."""
    steps: tuple[StepRecord, ...] = ()
    memory: MemoryUse | None = None
    finished: Finished | None = None
    seconds_total: float
    """From starting the process to its end."""
