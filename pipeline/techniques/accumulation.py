"""Gradient accumulation: the sequences of one optimizer step in several forward and backward passes."""

from dataclasses import replace
from typing import Self

from pydantic import PositiveInt

from pipeline.base.errors import InvalidInputError
from pipeline.base.technique import Mathematics, Step, Technique


class Accumulation(Technique):
    """effective_batch_size = micro_batch_size x accumulation_steps, exactly."""

    micro_batch_size: PositiveInt = 8
    """Sequences in one forward pass."""
    accumulation_steps: PositiveInt | None = None
    """Forward and backward passes per optimizer step; by default effective_batch_size / micro_batch_size, or 1."""
    effective_batch_size: PositiveInt | None = None
    """Sequences in one optimizer step; by default micro_batch_size x accumulation_steps."""

    @property
    def mathematics(self) -> Mathematics:
        """The same loss and gradients for any micro-batch size, but for the order of sums."""
        return Mathematics.EXACT

    @property
    def active(self) -> bool:
        """Whether an optimizer step has more than one forward pass."""
        return (self.resolved().accumulation_steps or 1) > 1

    def resolved(self) -> Self:
        """Return a copy with all three numbers; two of them must give the third exactly."""
        micro, steps, effective = self.micro_batch_size, self.accumulation_steps, self.effective_batch_size
        if effective is None:
            steps = steps or 1
        elif effective % micro:
            divisors = [n for n in range(1, effective + 1) if effective % n == 0]
            raise InvalidInputError(
                f"micro_batch_size must divide effective_batch_size: {micro} does not divide {effective}; "
                f"take one of {', '.join(map(str, divisors))}"
            )
        elif steps is None:
            steps = effective // micro
        elif micro * steps != effective:
            raise InvalidInputError(
                f"micro_batch_size x accumulation_steps must be effective_batch_size: {micro} x {steps} is not "
                f"{effective}; leave accumulation_steps out and it is derived"
            )
        return self.model_copy(update={"accumulation_steps": steps, "effective_batch_size": micro * steps})

    def apply(self, step: Step) -> Step:
        """Split every optimizer step into `accumulation_steps` passes of `micro_batch_size` sequences."""
        split = self.resolved()
        assert split.accumulation_steps is not None  # resolved() has set it
        return replace(step, micro_batch_size=split.micro_batch_size, accumulation_steps=split.accumulation_steps)
