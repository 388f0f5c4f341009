"""The optimizer: AdamW or another of torch's or bitsandbytes', and which of torch's implementations updates."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from pipeline.base.contracts import Hardware, Model
from pipeline.base.errors import InvalidInputError
from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique, source_of, without_idle
from pipeline.techniques._support.optimizers import IN_PLACE_OF_ADAMW, MuonAndAdamW, adamw_in_place_of, matrices_of

HAS_IMPLEMENTATIONS = ("adamw", "sgd", "muon")
"""Optimizers of which all, or for Muon AdamW's part, has torch's implementations."""
EMBEDDINGS = "[part for part in model.modules() if isinstance(part, nn.Embedding)]"
"""The modules whose weights have a state in float32, in an exported file."""


class Optimizer(Technique):
    """AdamW, or another optimizer in its place, with the run's learning_rate and weight_decay.

    torch's own default is foreach on CUDA and loop on a CPU; Fitproof's is fused.
    """

    stage: ClassVar[Stage] = Stage.OPTIMIZER

    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd", "muon"] = "adamw"
    """adamw, sgd, adafactor, muon (the layers' matrices; AdamW for others), or bitsandbytes' (paged_)adamw_8bit."""
    optimizer_implementation: Literal["fused", "foreach", "loop"] = "fused"
    """torch's fused; foreach, which holds intermediate copies of all parameters at once; or loop, of one at a time."""
    adamw_8bit_embeddings: Literal["float32", "8bit"] = "float32"
    """State of embeddings' weights in 8-bit AdamW: float32, as with transformers' Trainer, or 8bit."""
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
        """Another optimizer is another training; another implementation rounds elsewhere."""
        if self.optimizer != "adamw":
            return Mathematics.DIFFERENT
        return Mathematics.EXACT if self.optimizer_implementation == "fused" else Mathematics.ROUNDING

    @property
    def number_format(self) -> str | None:
        """Muon makes matrices orthogonal in bfloat16; a state of 8 bits rounds what differs in bits to other codes."""
        return "bf16" if self.optimizer == "muon" or self.is_8bit else None

    @property
    def is_8bit(self) -> bool:
        """Whether it is of bitsandbytes."""
        return self.optimizer.endswith("8bit")

    @property
    def untimed(self) -> tuple[str, ...]:
        """The optimizer, if its state may be in host memory: then its time depends on what is moved."""
        return ("optimizer",) if self.optimizer == "paged_adamw_8bit" else ()

    def notes(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield that a prediction does not see memory that torch's allocator does not manage."""
        if self.optimizer == "paged_adamw_8bit":
            yield (
                "optimizer=paged_adamw_8bit: the state of parameters of 100,000 elements and more (2 bytes an element, "
                "8 in float32) is in CUDA's managed memory, which neither a budget nor a predicted or measured peak of "
                "torch's allocator counts: it is on the GPU as far as there is room, else in host memory"
            )

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield that a setting is of another optimizer, bitsandbytes is absent, or the device has no managed memory."""
        if self.optimizer_implementation != "fused" and self.optimizer not in HAS_IMPLEMENTATIONS:
            yield (
                f"optimizer_implementation chooses among those of {', '.join(HAS_IMPLEMENTATIONS)}, and optimizer is "
                f"{self.optimizer} and optimizer_implementation {self.optimizer_implementation}; set "
                "optimizer_implementation=fused, which changes nothing there"
            )
        yield from without_idle(self, "optimizer_implementation")
        if self.is_8bit and find_spec("bitsandbytes") is None:
            yield (
                f"optimizer={self.optimizer} needs the package bitsandbytes, which is not installed; install it (pip "
                "install '.[finetune]' in the checkout), or set optimizer=adamw"
            )
        if self.optimizer == "paged_adamw_8bit" and hardware.kind != "cuda":
            yield (
                f"optimizer=paged_adamw_8bit keeps its state in CUDA's managed memory, and the device is "
                f"{hardware.name}; set optimizer=adamw_8bit, or device=cuda"
            )

    def export(self, target: str) -> Exported | None:
        """Return the functions that make the other optimizer from AdamW; axolotl's Adafactor and Muon are others.

        Trainer's 8-bit AdamW leaves the state of embeddings in float32; its adamw_torch and sgd are what torch chooses,
        foreach on CUDA.
        """
        name = self._name_in_trainer()
        if target == "axolotl":
            more = {"optim_args": {"momentum": self.sgd_momentum}} if name == "sgd" else {}
            return None if name is None else Exported(arguments={"optimizer": name, **more})
        modules = []
        if self.optimizer == "muon":
            modules = ["[model.get_submodule(name) for name in {layers}]"]
        elif self.is_8bit:
            modules = [EMBEDDINGS if self.adamw_8bit_embeddings == "float32" else "[]"]
        made, parts = "{optimizer}", list[Callable[..., Any]]()
        if self.optimizer_implementation != "fused":
            parts.append(adamw_in_place_of)
            made = f"adamw_in_place_of({made}, foreach={self.optimizer_implementation == 'foreach'})"
        if self.optimizer != "adamw":
            parts.append(IN_PLACE_OF_ADAMW[self.optimizer])
            settings = (f"{name}={value!r}" for name, value in self._arguments().items())
            made = f"{parts[-1].__name__}({', '.join([made, *modules, *settings])})"
        if self.optimizer == "muon":
            parts += [matrices_of, MuonAndAdamW]
        has_name = name not in (None, "sgd") and target in ("training_arguments", "trl")
        return Exported(
            code=source_of(*parts),
            optimizer=made,
            arguments={"optim": name} if has_name else {},
        )

    def _name_in_trainer(self) -> str | None:
        """Return the name that transformers' Trainer and axolotl have for it, None if they have none."""
        if self.is_8bit:
            return self.optimizer if self.adamw_8bit_embeddings == "float32" else None
        if self.optimizer == "adamw":
            return "adamw_torch" if self.optimizer_implementation == "foreach" else None
        return self.optimizer if self.optimizer == "sgd" and self.optimizer_implementation != "loop" else None

    def _arguments(self) -> dict[str, Any]:
        """Return the settings of the optimizer by torch's names."""
        of_each: dict[str, dict[str, Any]] = {
            "adamw_8bit": {"is_paged": False},
            "paged_adamw_8bit": {"is_paged": True},
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
        if self.optimizer == "adamw" and self.optimizer_implementation == "fused":
            return step
        if self.optimizer == "muon" and not matrices_of(step.trainable.layers):
            raise InvalidInputError(
                "optimizer=muon updates the matrices of a model's layers, and the layers of this model have none; set "
                "optimizer=adamw"
            )
        make_adamw, make_other = step.make_optimizer, IN_PLACE_OF_ADAMW[self.optimizer]

        def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
            adamw = make_adamw(module)
            if self.optimizer_implementation != "fused":
                adamw = adamw_in_place_of(adamw, foreach=self.optimizer_implementation == "foreach")
            if self.optimizer == "adamw":
                return adamw
            modules: list[Iterable[nn.Module]] = []
            if self.optimizer == "muon":
                modules = [step.trainable.layers]
            elif self.is_8bit:
                in_float32 = self.adamw_8bit_embeddings == "float32"
                modules = [[part for part in module.modules() if in_float32 and isinstance(part, nn.Embedding)]]
            return make_other(adamw, *modules, **self._arguments())

        return replace(step, make_optimizer=make_optimizer)
