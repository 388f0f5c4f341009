"""Optimizers made from a fused AdamW, with its parameters, learning rate and weight decay; master weights of any."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def adamw_in_place_of(adamw: torch.optim.Optimizer, *, foreach: bool) -> torch.optim.Optimizer:
    """Return an AdamW that updates all parameters by one operator at a time (foreach), or one after the other."""
    [group] = adamw.param_groups
    shared = {name: group[name] for name in ("lr", "weight_decay")}
    return torch.optim.AdamW(group["params"], **shared, fused=False, foreach=foreach)


def adamw_8bit_in_place_of(
    adamw: torch.optim.Optimizer, embeddings: Iterable[nn.Embedding], *, is_paged: bool
) -> torch.optim.Optimizer:
    """Return bitsandbytes' 8-bit AdamW with the parameters, learning rate and weight decay of an AdamW.

    The state of embeddings is in float32, as that of parameters below 4,096 elements.
    """
    from bitsandbytes.optim import AdamW8bit

    [group] = adamw.param_groups
    shared = {name: group[name] for name in ("lr", "weight_decay")}
    optimizer: torch.optim.Optimizer = AdamW8bit(group["params"], **shared, is_paged=is_paged)
    in_float32 = {embedding.weight for embedding in embeddings}
    for parameter in group["params"]:
        if parameter in in_float32:  # bitsandbytes' own way is a list of the whole process, by ids that are used again
            moments = {name: AdamW8bit.get_state_buffer(optimizer, parameter) for name in ("state1", "state2")}
            optimizer.state[parameter] = {"step": 0, **moments}
    return optimizer


def adafactor_in_place_of(adamw: torch.optim.Optimizer, **settings: Any) -> torch.optim.Optimizer:
    """Return Adafactor with the parameters, learning rate and weight decay of an AdamW."""
    [group] = adamw.param_groups
    return torch.optim.Adafactor(group["params"], lr=group["lr"], weight_decay=group["weight_decay"], **settings)


def sgd_in_place_of(adamw: torch.optim.Optimizer, momentum: float) -> torch.optim.Optimizer:
    """Return SGD with the parameters, learning rate and weight decay of an AdamW, and in its implementation."""
    [group] = adamw.param_groups
    shared = {name: group[name] for name in ("lr", "weight_decay", "fused", "foreach")}
    sgd = torch.optim.SGD(group["params"], momentum=momentum, **shared)
    if momentum:  # else a first step that fp16's loss scaling skips would leave the momentum uninitialized
        for parameter in group["params"]:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


def muon_in_place_of(
    adamw: torch.optim.Optimizer, layers: Iterable[nn.Module], **settings: Any
) -> torch.optim.Optimizer:
    """Return Muon for the matrices of these layers and AdamW for all other parameters of an AdamW."""
    [group] = adamw.param_groups
    shared = {name: group[name] for name in ("lr", "weight_decay")}
    matrices = matrices_of(layers)
    others = [parameter for parameter in group["params"] if parameter not in matrices]
    trained = [parameter for parameter in group["params"] if parameter in matrices]
    return MuonAndAdamW(
        torch.optim.Muon([{"params": trained}], **shared, **settings),
        torch.optim.AdamW([{"params": others}], **shared, fused=group["fused"], foreach=group["foreach"]),
    )


def matrices_of(layers: Iterable[nn.Module]) -> set[Tensor]:
    """Return the trained parameters of these layers with two axes, without those of embeddings."""
    modules = (module for layer in layers for module in layer.modules() if not isinstance(module, nn.Embedding))
    parameters = (parameter for module in modules for parameter in module.parameters(recurse=False))
    return {parameter for parameter in parameters if parameter.ndim == 2 and parameter.requires_grad}


class MuonAndAdamW(torch.optim.Optimizer):
    """One optimizer of the parameter groups and the state of a Muon and an AdamW."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        """Take the groups of both; the state of each parameter is made in the first step."""
        self._muon, self._adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes for a copy: torch's own method leaves out those that it does not know."""
        return self.__dict__

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters of Muon's groups, which alone have `ns_steps`, then those of AdamW's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each, is_muon in ((self._muon, True), (self._adamw, False)):
            each.state = self.state
            each.param_groups = [group for group in self.param_groups if ("ns_steps" in group) is is_muon]
            each.step()
        return loss


def with_master_weights(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let an optimizer update float32 copies of its 16-bit parameters, which are set to the rounded copies.

    In its step gradients become float32 before any parameter is updated; its zero_grad() is that of the parameters.
    """
    all_parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    copies = {each: each.detach().float() for each in all_parameters if each.dtype != torch.float32}
    for group in optimizer.param_groups:
        group["params"] = [copies.get(each, each) for each in group["params"]]
    for parameter, copy in copies.items():
        if parameter in optimizer.state:  # made with the optimizer, before its first step
            state = optimizer.state.pop(parameter).items()
            is_float = torch.is_floating_point
            optimizer.state[copy] = {
                name: value.float() if isinstance(value, Tensor) and is_float(value) else value for name, value in state
            }

    def take_gradients(*_: Any) -> None:
        for parameter, copy in copies.items():
            if copy.device != parameter.device:  # a framework may have moved the model since
                copy.data = copy.data.to(parameter.device)
            copy.grad = None if parameter.grad is None else parameter.grad.float()

    def round_copies(*_: Any) -> None:
        with torch.no_grad():
            for parameter, copy in copies.items():
                parameter.copy_(copy)
                copy.grad = None

    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in all_parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(round_copies)
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return optimizer


IN_PLACE_OF_ADAMW: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": adamw_in_place_of,
    "adamw_8bit": adamw_8bit_in_place_of,
    "paged_adamw_8bit": adamw_8bit_in_place_of,
    "adafactor": adafactor_in_place_of,
    "sgd": sgd_in_place_of,
    "muon": muon_in_place_of,
}
"""(fused AdamW, for Muon the layers and in 8 bits the embeddings, settings) -> the optimizer."""
