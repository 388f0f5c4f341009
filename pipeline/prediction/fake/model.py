"""A model that was built with values, because its code reads some while it builds it, without these values."""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def leave_out_values(module: nn.Module, device: torch.device) -> None:
    """Replace the tensors of a module by fake ones of the same form on `device`, under the mode that makes those.

    Tensors that share a storage still do.
    """
    made: dict[tuple[int, torch.dtype], Tensor] = {}
    """By storage."""
    parameters: dict[int, nn.Parameter] = {}

    def without_values(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, num_elements = (storage._cdata, tensor.dtype), storage.nbytes() // tensor.itemsize
        if key not in made:
            form = (tensor.shape, tensor.stride()) if tensor.numel() == num_elements else ((num_elements,), (1,))
            made[key] = torch.empty_strided(*form, dtype=tensor.dtype, device=device)
        alike = made[key]
        if (alike.shape, alike.stride()) != (tensor.shape, tensor.stride()):
            alike = alike.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if not isinstance(tensor, nn.Parameter):
            return alike
        if id(tensor) not in parameters:
            parameters[id(tensor)] = nn.Parameter(alike, requires_grad=tensor.requires_grad)
        return parameters[id(tensor)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers, vars(part)):
            for name, tensor in list(tensors.items()):
                if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
                    tensors[name] = without_values(tensor)  # type: ignore[assignment]
