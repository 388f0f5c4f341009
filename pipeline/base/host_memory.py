"""A limit on what is allocated on the host: a model that is built for its structure alone must not exhaust it."""

from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB

CHECKED_BYTES = 16 * MIB
"""Size of a storage from which on the memory that is free is looked up."""


class WithinHostMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses, while it is active, a storage on the CPU that is larger than the memory that is free.

    What is only allocated takes no memory yet: a storage is refused before its values are written.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and check the storages that it made.

        Raises:
            InvalidInputError: one is larger than the memory that is free.

        """
        result = func(*args, **(kwargs or {}))
        made = {key: one for key, one in _by_storage(result).items() if _num_bytes(one) >= CHECKED_BYTES}
        for key in made and made.keys() - _by_storage((args, kwargs)):
            tensor, free_bytes = made[key], psutil.virtual_memory().available
            if _num_bytes(tensor) > free_bytes:
                raise InvalidInputError(
                    "a model that is built with the values of its tensors must fit this machine's memory, and "
                    f"{tuple(tensor.shape)} of {tensor.dtype} takes {_num_bytes(tensor) / MIB:,.0f} MiB, with "
                    f"{free_bytes / MIB:,.0f} MiB free; let it be built without values, or use a larger machine"
                )
        return result


def _by_storage(tree: Any) -> dict[int, Tensor]:
    """Return a tensor of each storage on the CPU; sparse tensors have none."""
    tensors = (one for one in tree_leaves(tree) if isinstance(one, Tensor) and one.layout is torch.strided)
    return {one.untyped_storage()._cdata: one for one in tensors if one.device.type == "cpu"}


def _num_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
