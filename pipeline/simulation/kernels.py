"""Where a real operator's memory is not that of its fake counterpart."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
NO_REDUCTION = 0
"""torch's number for reduction="none" (torch.nn._reduction)."""


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the results of fake operators the storages that real ones have; enter it after FakeTensorMode."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and mend what it made."""
        result = func(*args, **(kwargs or {}))
        if func is aten.mse_loss.default:
            return _with_room_for_all_elements(result, *args)
        return result


def _with_room_for_all_elements(loss: Tensor, inputs: Tensor, targets: Tensor, reduction: int = 1) -> Tensor:
    """Return a loss whose storage is that of the losses of all elements, which were summed in place.

    Seen on a CPU; mse_loss_out in torch's aten/src/ATen/native/BinaryOps.cpp and Loss.cpp is one for all devices.
    """
    if reduction == NO_REDUCTION:
        return loss
    shape = torch.broadcast_shapes(inputs.shape, targets.shape)  # type: ignore[no-untyped-call]
    return torch.empty(shape, dtype=loss.dtype).flatten()[0]
