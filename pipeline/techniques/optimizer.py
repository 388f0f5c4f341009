"""The optimizer: fused AdamW, or another of torch's, which keeps less state for each parameter."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pipeline.base.errors import InvalidInputError
from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique

IMPORTS = """from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
"""
"""What the functions below need in an exported file."""


class Optimizer(Technique):
    """AdamW, or another optimizer of torch in its place, with the run's learning_rate and weight_decay."""

    stage: ClassVar[Stage] = Stage.OPTIMIZER

    optimizer: Literal["adamw", "adafactor", "sgd", "muon"] = "adamw"
    """adamw and sgd (both fused), adafactor, or muon: Muon for the matrices of the layers, AdamW for the others."""
    adafactor_beta2_decay: float = Field(default=-0.8, le=0)
    """The exponent d of Adafactor's second-moment decay, 1 - t**d at step t."""
    adafactor_clipping: float = Field(default=1.0, ge=1)
    """The root mean square to which Adafactor clips each parameter's update, before its learning rate."""
    sgd_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of SGD; 0: none, and so no optimizer state."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon."""
    muon_scaling: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of Muon's update by a matrix's shape: match_rms_adamw, which suits AdamW's learning rate, or original."""

    @property
    def mathematics(self) -> Mathematics:
        """Another optimizer is another training."""
        return Mathematics.DIFFERENT if self.active else Mathematics.EXACT

    @property
    def active(self) -> bool:
        """Whether it is another optimizer than AdamW."""
        return self.optimizer != "adamw"

    @property
    def number_format(self) -> str | None:
        """Muon makes matrices orthogonal in bfloat16."""
        return "bf16" if self.optimizer == "muon" else None

    def conflict(self, settings: Any) -> str | None:
        """Return that a setting belongs to an optimizer that is not used."""
        del settings
        for name, field in type(self).model_fields.items():
            owner, value = name.partition("_")[0], getattr(self, name)
            if name != "optimizer" and owner != self.optimizer and value != field.default:
                return (
                    f"{name} is a setting of optimizer={owner}, and optimizer is {self.optimizer} and {name} {value}; "
                    f"set optimizer={owner} or {name}={field.default}"
                )
        return None

    def export(self, target: str) -> Exported | None:
        """Return the function that makes the other optimizer from AdamW; axolotl's Adafactor and Muon are others."""
        if target == "axolotl":
            of_sgd = {"optimizer": "sgd", "optim_args": {"momentum": self.sgd_momentum}}
            return Exported(arguments=of_sgd) if self.optimizer == "sgd" else None
        layers = ["[model.get_submodule(name) for name in {layers}]"] if self.optimizer == "muon" else []
        arguments = ["{optimizer}", *layers, *(f"{name}={value!r}" for name, value in self._arguments().items())]
        parts: list[Callable[..., Any]] = [IN_PLACE_OF_ADAMW[self.optimizer]]
        if self.optimizer == "muon":
            parts += [matrices_of, MuonAndAdamW]
        code = "\n\n\n".join([IMPORTS, *(inspect.getsource(part).strip() for part in parts)])
        return Exported(code=code, optimizer=f"{parts[0].__name__}({', '.join(arguments)})")

    def _arguments(self) -> dict[str, Any]:
        """Return the settings of the optimizer by torch's names."""
        of_each: dict[str, dict[str, Any]] = {
            "adafactor": {"beta2_decay": self.adafactor_beta2_decay, "d": self.adafactor_clipping},
            "sgd": {"momentum": self.sgd_momentum},
            "muon": {"momentum": self.muon_momentum, "adjust_lr_fn": self.muon_scaling},
        }
        return of_each[self.optimizer]

    def apply(self, step: Step) -> Step:
        """Replace the optimizer that the step makes by another one of the same parameters.

        Raises:
            InvalidInputError: it is Muon, and the model's layers have no matrix.

        """
        if not self.active:
            return step
        layers = [step.trainable.layers] if self.optimizer == "muon" else []
        if layers and not matrices_of(*layers):
            raise InvalidInputError(
                "optimizer=muon updates the matrices of a model's layers, and the layers of this model have none; set "
                "optimizer=adamw"
            )
        make_adamw, make_other = step.make_optimizer, IN_PLACE_OF_ADAMW[self.optimizer]
        return replace(step, make_optimizer=lambda module: make_other(make_adamw(module), *layers, **self._arguments()))


def adafactor_in_place_of(adamw: torch.optim.Optimizer, **settings: Any) -> torch.optim.Optimizer:
    """Return Adafactor with the parameters, learning rate and weight decay of an AdamW."""
    [group] = adamw.param_groups
    return torch.optim.Adafactor(group["params"], lr=group["lr"], weight_decay=group["weight_decay"], **settings)


def sgd_in_place_of(adamw: torch.optim.Optimizer, momentum: float) -> torch.optim.Optimizer:
    """Return SGD with the parameters, learning rate and weight decay of an AdamW, fused if that is."""
    [group] = adamw.param_groups
    shared = {name: group[name] for name in ("lr", "weight_decay", "fused")}
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
        torch.optim.AdamW([{"params": others}], **shared, fused=group["fused"]),
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


IN_PLACE_OF_ADAMW: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adafactor": adafactor_in_place_of,
    "sgd": sgd_in_place_of,
    "muon": muon_in_place_of,
}
"""(AdamW, for Muon the layers, settings) -> the optimizer."""
