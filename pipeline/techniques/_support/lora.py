"""Adapters of linear layers (LoRA: https://arxiv.org/abs/2106.09685), by peft."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def is_target(name: str, target: str) -> bool:
    """Whether a linear layer of this name inside a model's layer is one of `target`: all, attention, or its name."""
    if target == "attention":
        return "attn" in name or "attention" in name
    return target == "all" or f".{name}".endswith(f".{target}")


def linear_layers(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers inside a model's layer by name, but for those whose weights torch reads itself."""
    from transformers.pytorch_utils import Conv1D

    reads_weights = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    owners = {name: part for name, part in layer.named_modules() if not isinstance(part, reads_weights)}
    children = {
        f"{name}.{own_name}".removeprefix("."): child
        for name, owner in owners.items()
        for own_name, child in owner.named_children()
    }
    return {name: child for name, child in children.items() if isinstance(child, nn.Linear | Conv1D)}


def outside_layers(model: nn.Module, layers: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the linear layers and embeddings of a model by name that are outside of its layers, as its head."""
    inside = {part for layer in layers for part in layer.modules()}
    kinds = (nn.Linear, nn.Embedding)
    return {name: part for name, part in model.named_modules() if isinstance(part, kinds) and part not in inside}


def adapted_modules(model: nn.Module, layers: Iterable[nn.Module], targets: str) -> dict[nn.Module, str]:
    """Return the modules that `targets` names, with commas, each with its name inside its layer or the model.

    They are linear layers inside layers and, where one is named, linear layers and embeddings outside of them.
    """
    layers, named = list(layers), targets.split(",")
    words = [target for target in named if target not in ("all", "attention")]
    linear = [(name, part) for layer in layers for name, part in linear_layers(layer).items()]
    found = {part: name for name, part in linear if any(is_target(name, target) for target in named)}
    others = outside_layers(model, layers).items()
    return found | {part: name for name, part in others if any(is_target(name, target) for target in words)}


def add_adapters(
    model: nn.Module, layers: Iterable[nn.Module], targets: str, dtype: torch.dtype, **settings: Any
) -> None:
    """Freeze a model, and add adapters to those of its modules that `targets` names."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    adapted = adapted_modules(model, layers, targets)
    names = [name for name, part in model.named_modules() if part in adapted]
    has_transposed_weights = any(isinstance(part, Conv1D) for part in adapted)
    config = LoraConfig(target_modules=names, fan_in_fan_out=has_transposed_weights, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to True")  # it is, of those that have them transposed
        inject_adapter_in_model(config, model)
    for part in model.modules():
        if isinstance(part, LoraLayer):
            matrices = (part.lora_A, part.lora_B, part.lora_embedding_A, part.lora_embedding_B)
            for parameter in (each for matrix in matrices for each in matrix.parameters()):
                parameter.data = parameter.data.to(dtype)


def without_frozen(optimizer: Optimizer) -> Optimizer:
    """Take the parameters that are not trained from an optimizer."""
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    return optimizer
