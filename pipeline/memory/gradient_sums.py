"""Which sums of gradients autograd would write over their first summand, if nothing were recording.

Where several gradients meet, autograd adds in place if nobody else holds what it has (torch's input_buffer.cpp,
can_accumulate_inplace), but not while a dispatch mode is active: under a recorder each such sum would seem to need
memory of its own.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SUM = torch.ops.aten.add.Tensor
NO_GRAPH_TASK = -1
"""What torch calls the graph task outside of a backward pass."""


def in_backward() -> bool:
    """Return whether a backward pass is going on."""
    return torch._C._current_graph_task_id() != NO_GRAPH_TASK


def calibrate() -> None:
    """Learn, once and outside of any backward pass, what the first use of is_written_over needs to know."""
    _holders_of_own()


def is_written_over(operator: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether autograd would write the result of `operator` over its first argument."""
    if operator is not SUM or not in_backward() or torch.is_grad_enabled():
        return False
    summand = arguments[0]
    return isinstance(summand, Tensor) and _holders(summand) == _holders_of_own()


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Return how many hold a tensor and its storage; a view and what it is a view of hold the same storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


@cache
def _holders_of_own() -> tuple[int, int]:
    """Return the holders of a tensor that autograd alone holds, as a dispatch mode of this torch sees it."""
    seen: list[tuple[int, int]] = []
    number = torch.ones((), device="cpu", requires_grad=True)
    with torch.enable_grad(), _Look(seen.append):
        (number * 2 + number * 3).backward()  # type: ignore[no-untyped-call]
    return seen[0]


class _Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells the holders of the first summand of each sum of a backward pass."""

    def __init__(self, emit: Callable[[tuple[int, int]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = emit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator."""
        if func is SUM and in_backward():
            self._tell(_holders(args[0]))
        return func(*args, **(kwargs or {}))
