"""How the sequences of one optimizer step are cut into forward passes."""

from dataclasses import replace
from typing import Self

from pydantic import PositiveInt

from pipeline.base.contracts import Step, Technique
from pipeline.base.errors import InvalidInputError


class Accumulation(Technique):
    """effective batch = micro-batch x accumulation steps, exactly."""

    micro_batch_size: PositiveInt = 8
    """Sequences in one forward pass."""
    accumulation_steps: PositiveInt | None = None
    """Forward and backward passes per optimizer step; by default effective_batch_size / micro_batch_size, or 1."""
    effective_batch_size: PositiveInt | None = None
    """Sequences in one optimizer step; by default micro_batch_size x accumulation_steps."""

    def resolved(self) -> Self:
        """Derive whichever of the three numbers is missing; a micro-batch that does not divide is refused."""
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
        """Cut every optimizer step into this many forward passes of this size."""
        cut = self.resolved()
        assert cut.accumulation_steps is not None  # resolved() has filled it in
        return replace(step, micro_batch_size=cut.micro_batch_size, accumulation_steps=cut.accumulation_steps)
