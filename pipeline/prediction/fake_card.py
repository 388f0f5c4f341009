"""Moving a model from the host to a simulated GPU, tensor by tensor, as torch.nn.Module.to does."""

import torch
from torch import Tensor, nn

from pipeline.prediction.four_bit import is_four_bit, quantized_on_device

HOST = torch.device("meta")
"""Stands for host memory, which is not counted."""
CARD = torch.device("cpu")
"""Stands for the card: the only device on which fake tensors can run backward on every machine."""


def move_to_card(module: nn.Module) -> None:
    """Replace the parameters and buffers of a module, built on HOST, by new ones on CARD; shared ones stay shared."""
    moved: dict[Tensor, Tensor] = {}  # its keys keep the old ones alive: a new tensor could get the id of a freed one

    def moved_tensor(tensor: Tensor) -> Tensor:
        if tensor not in moved:
            layout = torch.contiguous_format if is_four_bit(tensor) else torch.preserve_format
            copy = torch.empty_like(tensor, device=CARD, memory_format=layout)
            if isinstance(tensor, nn.Parameter):
                packed = quantized_on_device(tensor, copy)
                copy = nn.Parameter(copy, requires_grad=tensor.requires_grad) if packed is None else packed
            moved[tensor] = copy
        return moved[tensor]

    for part in _children_first(module, set()):
        for tensors in (part._parameters, part._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    tensors[name] = moved_tensor(tensor)  # type: ignore[assignment]


def _children_first(module: nn.Module, seen: set[nn.Module]) -> list[nn.Module]:
    """Return all modules in the order in which torch.nn.Module._apply visits them first."""
    if module in seen:
        return []
    seen.add(module)
    return [part for child in module.children() for part in _children_first(child, seen)] + [module]
