"""A model that comes to a simulated GPU from the host, tensor by tensor as torch.nn.Module.to moves them."""

import torch
from torch import Tensor, nn

HOST = torch.device("meta")
"""Stands for the memory of the host, which nobody counts."""
CARD = torch.device("cpu")
"""Stands for the memory of the card: the one device whose fake tensors can run backward everywhere."""


def move_to_card(module: nn.Module) -> None:
    """Give a module that was built on HOST new parameters and buffers on CARD; what was shared stays shared."""
    moved: dict[int, Tensor] = {}

    def arrived(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            copy = torch.empty_like(tensor, device=CARD)
            is_parameter = isinstance(tensor, nn.Parameter)
            moved[id(tensor)] = nn.Parameter(copy, requires_grad=tensor.requires_grad) if is_parameter else copy
        return moved[id(tensor)]

    for part in _children_first(module):
        for tensors in (part._parameters, part._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    tensors[name] = arrived(tensor)  # type: ignore[assignment]


def _children_first(module: nn.Module) -> list[nn.Module]:
    """Return all parts in the order in which torch.nn.Module._apply comes to them."""
    return [part for child in module.children() for part in _children_first(child)] + [module]
