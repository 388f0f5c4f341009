"""Sums of gradients that autograd computes in place when no recorder is active.

Where a tensor receives several gradients, autograd adds in place if it holds the only reference (torch's
input_buffer.cpp, can_accumulate_inplace), but not under a dispatch mode: a recorder would count memory that a run does
not need.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SUM = torch.ops.aten.add.Tensor
NO_GRAPH_TASK = -1
"""torch's graph task number outside of a backward pass."""


def in_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != NO_GRAPH_TASK


def calibrate() -> None:
    """Measure the reference counts that is_in_place_sum() compares with, once and outside of a backward pass."""
    _sole_references()


def is_in_place_sum(operator: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether autograd would compute this call in place, without a recorder."""
    if operator is not SUM or not in_backward() or torch.is_grad_enabled():
        return False
    summand = arguments[0]
    return isinstance(summand, Tensor) and _references(summand) == _sole_references()


def _references(tensor: Tensor) -> tuple[int, int]:
    """Return the reference counts of a tensor and of its storage, which a view shares with its base."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


@cache
def _sole_references() -> tuple[int, int]:
    """Return the reference counts of a tensor that only autograd refers to, as a dispatch mode sees them."""
    seen: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            if func is SUM and in_backward():
                seen.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    number = torch.ones((), device="cpu", requires_grad=True)
    with torch.enable_grad(), Probe():  # type: ignore[no-untyped-call]
        (number * 2 + number * 3).backward()  # type: ignore[no-untyped-call]
    return seen[0]
