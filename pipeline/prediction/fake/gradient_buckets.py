"""DistributedDataParallel on fake tensors: what it and its reducer allocate, for one rank without the others.

The rules are those of torch/csrc/distributed/c10d/reducer.cpp, with gradient_as_bucket_view and without
find_unused_parameters. The sums themselves take no memory: they are computed in place.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from pipeline.base.units import MIB
from pipeline.techniques._support.data_parallel import Accumulating

LIMITS = [1 * MIB, 25 * MIB]
"""Bytes from which on a bucket is full: of the first one, and of all others (dist._DEFAULT_FIRST_BUCKET_BYTES, DDP)."""


class GradientBuckets(nn.Module):
    """Stands for DistributedDataParallel: its buckets, of which the parameters' gradients are views."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._arrived: list[int] = []
        self.no_sync = Accumulating()
        """Entered around a forward pass whose backward pass is not synchronized."""
        self._is_synchronized, self._is_final = False, False
        self._allocate(range(len(self._trained)), [sys.maxsize])
        for number, parameter in enumerate(self._trained):
            parameter.register_post_accumulate_grad_hook(partial(self._note, number))  # type: ignore[no-untyped-call]

    def forward(self, *args: Any) -> Any:
        """Call the module; after the first synchronized backward pass make the buckets anew."""
        if self._arrived and not self._is_final and torch.is_grad_enabled():
            self._allocate(self._arrived, LIMITS)
            self._is_final = True
        self._is_synchronized = not self.no_sync.is_entered
        return self.module(*args)

    def register_comm_hook(self, *_: object) -> None:
        """Do nothing: nothing is communicated."""

    def _note(self, number: int, _: Tensor) -> None:
        """Note the order in which gradients arrive."""
        if self._is_synchronized and not self._is_final:
            self._arrived.append(number)

    def _allocate(self, numbers: Sequence[int], limits: list[int]) -> None:
        """Make buckets for these parameters and let their gradients be views of them."""
        order = list(numbers) if self._arrived else []  # in any other order they are sorted
        groups = _groups([self._trained[number] for number in numbers], limits, order)
        for group in groups if order else reversed(groups):
            members = [self._trained[number] for number in group]
            bucket = torch.empty(sum(map(torch.numel, members)), dtype=members[0].dtype, device=members[0].device)
            start = 0
            for member in members:
                member.grad = bucket.as_strided(member.shape, member.stride(), start)
                start += member.numel()


def _groups(tensors: Sequence[Tensor], limits: list[int], order: list[int]) -> list[list[int]]:
    """Return the numbers of the tensors that share a bucket: as they are, or those in `order`, which is kept."""
    groups, _ = _compute_bucket_assignment_by_size(list(tensors), limits, [False] * len(tensors), order)
    return groups
