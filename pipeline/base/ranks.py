"""The ranks of a run: the processes that take its optimizer steps together, and what they exchange."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.base.results import MemoryUse

Part = TypeVar("Part")


@dataclass(frozen=True)
class CollectiveEntered:
    """The event that a rank is about to wait for the other ranks; the rank that has entered the fewest is awaited."""


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor of which each rank has a part (a DTensor) as one that each rank has; another as it is."""
    gather = getattr(tensor, "full_tensor", None)  # without the import of torch.distributed.tensor
    gathered: Tensor = tensor if gather is None else gather()
    return gathered


def num_data_ranks(world_size: int, tensor_parallel: int) -> int:
    """Return the groups of ranks that take sequences of their own; 1 where the ranks cannot be divided so."""
    return max(1, world_size // tensor_parallel)


def data_ranks_in_settings(tensor_parallel: int) -> str:
    """Return how settings say the number of groups of ranks that take sequences of their own."""
    return "world_size" if tensor_parallel == 1 else "world_size / tensor_parallel"


class Ranks:
    """The processes of a run, each on a device of its own; without a process group nothing is exchanged.

    Prediction has no process group: there this process is the first of `size` ranks.
    """

    def __init__(
        self,
        size: int = 1,
        emit: Callable[[CollectiveEntered], Any] = lambda _: None,
        tensor_parallel: int = 1,
    ) -> None:
        self.size, self.tensor_parallel, self._emit = size, tensor_parallel, emit
        self.num_data_ranks = num_data_ranks(size, tensor_parallel)
        """Groups of neighbouring ranks that take the same sequences, and divide each matrix."""
        self.has_group = size > 1 and dist.is_initialized()
        """Whether they exchange anything, or a simulated card makes them believe so."""
        self.rank = dist.get_rank() if self.has_group else 0
        """This process's number, counted from 0."""
        self.data_rank = self.rank // tensor_parallel
        """The number of its group, counted from 0."""

    @property
    def are_imagined(self) -> bool:
        """Whether this process is the only one of them: in prediction, or as a simulated card makes it one of many."""
        return not self.has_group or "SIMULATED_CARD_RANK" in os.environ

    def own(self, micro_batches: Sequence[Part]) -> tuple[Part, ...]:
        """Return this rank's share of micro-batches: in each pass the groups take the next ones, in their order."""
        return tuple(micro_batches[self.data_rank :: self.num_data_ranks])

    def own_of_each_pass(self, micro_batches: Sequence[Part]) -> tuple[tuple[Part, bool], ...]:
        """Return the same with whether it counts: where the last pass has too few, some ranks repeat the last one.

        Each rank then runs as many passes as the others, which wait for one that gathers parameters with them.
        """
        count = self.num_data_ranks
        numbers = range(self.data_rank, math.ceil(len(micro_batches) / count) * count, count)
        last = len(micro_batches) - 1
        return tuple((micro_batches[min(number, last)], number <= last) for number in numbers)

    def entered(self) -> None:
        """Emit that a collective operation begins."""
        if self.has_group:
            self._emit(CollectiveEntered())

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor, the same in a group, by its sum over all groups, without waiting for the device."""
        if self.has_group:
            self.entered()
            dist.all_reduce(tensor)
            if self.tensor_parallel > 1:
                tensor /= self.tensor_parallel

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest value of all ranks for each of these numbers, which are on the host."""
        if not self.has_group:
            return list(values)
        self.entered()
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        largest: list[float] = tensor.tolist()
        return largest

    def largest_use(self, use: MemoryUse) -> MemoryUse:
        """Return the largest value of all ranks for each measurement of memory."""
        names = [each.name for each in fields(use) if isinstance(getattr(use, each.name), int)]
        sizes = [*(getattr(use, name) for name in names), *(phase.allocated_bytes for phase in use.phases)]
        values = [int(value) for value in self.largest(sizes)]
        of_phases = zip(use.phases, values[len(names) :], strict=True)
        phases = tuple(replace(phase, allocated_bytes=num_bytes) for phase, num_bytes in of_phases)
        return replace(use, phases=phases, **dict(zip(names, values, strict=False)))
