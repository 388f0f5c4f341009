"""Gradient accumulation: the sequences of one optimizer step in several passes, and in several processes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

from pydantic import PositiveInt

from pipeline.base.contracts import Hardware, Model
from pipeline.base.errors import InvalidInputError
from pipeline.base.ranks import data_ranks_in_settings, num_data_ranks
from pipeline.base.technique import Mathematics, Step, Technique
from pipeline.base.units import divisors, powers_of_two

USUAL_MICRO_BATCH_SIZE = 8
"""Sequences in one forward pass where nothing is said of the batch."""


class Accumulation(Technique):
    """effective_batch_size = micro_batch_size x accumulation_steps x world_size / tensor_parallel, exactly."""

    micro_batch_size: PositiveInt | None = None
    """Sequences in one forward pass; by default what the other numbers leave, or as many up to 8 as divide them."""
    accumulation_steps: PositiveInt | None = None
    """Passes per optimizer step; by default what the other numbers leave, or 1."""
    effective_batch_size: PositiveInt | None = None
    """Sequences in one optimizer step; by default those of all passes, micro_batch_size x accumulation_steps x
    world_size / tensor_parallel."""
    world_size: PositiveInt = 1
    """Processes that train together, each on a GPU of its own, or on its share of the CPU."""

    @property
    def mathematics(self) -> Mathematics:
        """The same loss and gradients for any micro-batch size, but for the order of sums."""
        return Mathematics.EXACT

    @property
    def untimed(self) -> tuple[str, ...]:
        """The number of processes, if there are several: it is not counted how much of what they exchange overlaps."""
        return ("world_size",) if self.world_size > 1 else ()

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[Any, ...]:
        """Return the numbers of processes for a machine with several GPUs: powers of two, and one for each GPU.

        The processes of a CPU share its cores, and gain nothing.
        """
        if setting != "world_size":
            return super().values_to_try(setting, hardware)
        count = hardware.count or 1
        if hardware.kind != "cuda":
            return (1,)
        return tuple(sorted({*powers_of_two(count), count}))

    def resolved(self, tensor_parallel: int) -> Self:
        """Return a copy with all four numbers; with world_size, two of the others must give the third exactly.

        Where only world_size does not divide the batch, refusals() refuses it: a space leaves such combinations out.

        Raises:
            InvalidInputError: the numbers contradict each other.

        """
        steps, effective = self.accumulation_steps, self.effective_batch_size
        ranks = num_data_ranks(self.world_size, tensor_parallel)
        name = data_ranks_in_settings(tensor_parallel)
        micro = self.micro_batch_size or self._default_micro_batch_size(ranks)
        if effective is None:
            steps = steps or 1
            effective = micro * steps * ranks
        elif effective % micro:
            raise InvalidInputError(
                f"micro_batch_size must divide effective_batch_size: {micro} does not divide {effective}; "
                f"take one of {_divisors(effective if effective % ranks else effective // ranks)}"
            )
        elif steps is None:
            steps = max(1, effective // (micro * ranks))
        elif micro * steps * ranks != effective:
            others = f" x {ranks}" if ranks > 1 else ""
            raise InvalidInputError(
                f"micro_batch_size x accumulation_steps{f' x {name}' if others else ''} must be "
                f"effective_batch_size: {micro} x {steps}{others} is not {effective}; leave accumulation_steps out and "
                "it is derived"
            )
        numbers = {"micro_batch_size": micro, "accumulation_steps": steps, "effective_batch_size": effective}
        return self.model_copy(update=numbers)

    def _default_micro_batch_size(self, ranks: int) -> int:
        """Return what the other numbers leave of the batch, or the largest up to the usual one that divides it.

        Where world_size does not divide the batch it is 1, and refusals() says so.
        """
        steps, effective = self.accumulation_steps, self.effective_batch_size
        if effective is None:
            return USUAL_MICRO_BATCH_SIZE
        if steps is not None:
            if effective % (steps * ranks):
                raise InvalidInputError(
                    f"accumulation_steps must divide effective_batch_size: {steps} does not divide "
                    f"{effective // ranks}, the sequences of a process; take one of "
                    f"{_divisors(effective // ranks)}, or leave it out"
                )
            return effective // (steps * ranks)
        share = 1 if effective % ranks else effective // ranks
        return max(size for size in divisors(share) if size <= USUAL_MICRO_BATCH_SIZE)

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield that the processes cannot share the batch, begin at another GPU than the first, or are too many."""
        micro, world, effective = settings.micro_batch_size, self.world_size, settings.effective_batch_size
        if world == 1:
            return
        ranks, name = num_data_ranks(world, settings.tensor_parallel), data_ranks_in_settings(settings.tensor_parallel)
        if effective % ranks:
            yield (
                f"{name} must divide effective_batch_size: {ranks} does not divide {effective}; set "
                f"effective_batch_size to a multiple of {ranks}, or {name} to one of {_divisors(effective)}"
            )
        if effective % (micro * ranks):
            yield (
                f"micro_batch_size x {name} must divide effective_batch_size: {micro} x {ranks} does "
                f"not divide {effective}; set micro_batch_size to one of {_divisors(effective // ranks)}"
            )
        if settings.device not in ("auto", "cpu", "cuda", "cuda:0"):
            yield (
                f"the processes of world_size={world} take the visible GPUs from the first one on, and device is "
                f"{settings.device}; leave device out, and choose GPUs with CUDA_VISIBLE_DEVICES"
            )
        if hardware.count is not None and world > hardware.count:
            on_gpus = hardware.kind == "cuda"
            what = "GPUs, one for each process" if on_gpus else "CPU cores, one or more for each process"
            yield (
                f"world_size={world} needs as many {what}, and there are {hardware.count}; set it to {hardware.count} "
                "or less"
            )

    def apply(self, step: Step) -> Step:
        """Split every optimizer step into `accumulation_steps` passes of `micro_batch_size` sequences."""
        assert self.micro_batch_size is not None and self.accumulation_steps is not None  # resolved() has set them
        return replace(step, micro_batch_size=self.micro_batch_size, accumulation_steps=self.accumulation_steps)


def _divisors(number: int) -> str:
    return ", ".join(map(str, divisors(number)))
