"""Three optimizer steps of any module on a card: what `simulate(model=..., inputs=..., optimizer=...)` runs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

NUM_STEPS = 3
CARD = "cuda"

Model = nn.Module | Callable[[], nn.Module]
Inputs = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]
MakeOptimizer = Callable[..., torch.optim.Optimizer]


def three_steps(model: Model, inputs: Inputs, make_optimizer: MakeOptimizer) -> None:
    """Train a module on these inputs; a callable makes it on the card, and one on the device meta gets its memory."""
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)  # what a tokenizer returns is a leaf for tree_map
    module = _on_card(model)
    optimizer = make_optimizer(module.parameters())
    for _ in range(NUM_STEPS):
        moved = tree_map(lambda it: it.to(CARD) if isinstance(it, torch.Tensor) else it, inputs)
        if isinstance(moved, Mapping):
            output = module(**moved)
        else:
            output = module(*moved) if isinstance(moved, tuple) else module(moved)
        loss = _loss(output)
        del output
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _on_card(model: Model) -> nn.Module:
    if not isinstance(model, nn.Module):
        with torch.device(CARD):
            model = model()
        return model.to(CARD)
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model.to(CARD)
    tied: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(parameter, []).append(name)
    model.to_empty(device=CARD)
    for first, *others in tied.values():  # to_empty() makes each of them anew
        for path, _, own in (name.rpartition(".") for name in others):
            setattr(model.get_submodule(path), own, model.get_parameter(first))
    return model


def _loss(output: Any) -> torch.Tensor:
    """Return the loss of a model's output: its own, or the sum of all its floating-point tensors."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    numbers = [it for it in tree_leaves(output) if isinstance(it, torch.Tensor) and it.is_floating_point()]
    return torch.stack([it.float().sum() for it in numbers]).sum() if len(numbers) > 1 else numbers[0].sum()
