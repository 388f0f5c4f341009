"""GELU in its tanh form: one kernel of torch in place of eight operators, whose results autograd would store."""

from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from pipeline.base.contracts import Hardware, Model
from pipeline.base.errors import InvalidInputError
from pipeline.base.technique import Exported, Mathematics, Step, Technique, source_of

REPLACED = ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
"""transformers' names (ACT2FN) of the tanh form in separate operators."""


class Gelu(Technique):
    """GPT-2's activation function by torch's own kernel."""

    gelu: Literal["model", "fused"] = "model"
    """model: as the model computes it; fused: GELU's tanh form (gelu_new) in one kernel."""

    @property
    def mathematics(self) -> Mathematics:
        """The same function; the kernel rounds once and not after each operator."""
        return Mathematics.EXACT if self.gelu == "model" else Mathematics.ROUNDING

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield that the model has nothing to replace."""
        if self.gelu == "model":
            return
        activation = model.describe(settings.model).activation
        if activation not in REPLACED:
            yield (
                f"gelu=fused replaces {', '.join(REPLACED[:-1])} or {REPLACED[-1]}, and the activation of "
                f"{settings.model} is {activation or 'not one of transformers'}; set gelu=model"
            )

    def export(self, target: str) -> Exported:
        """Return the function that replaces the modules, for any framework."""
        return Exported(code=source_of(fuse_gelus), prepare="fuse_gelus(model)")

    def apply(self, step: Step) -> Step:
        """Replace the modules.

        Raises:
            InvalidInputError: there are none.

        """
        if self.gelu == "fused" and fuse_gelus(step.trainable.module) == 0:
            raise InvalidInputError(
                f"gelu=fused replaces transformers' modules of {', '.join(REPLACED[:-1])} or {REPLACED[-1]}, and the "
                "model has none; set gelu=model"
            )
        return step


def fuse_gelus(model: nn.Module) -> int:
    """Replace the modules of transformers that compute GELU's tanh form in separate operators; return their number."""
    separate = ("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation", "GELUTanh")
    modules = model.named_modules(remove_duplicate=False)
    names = [name for name, module in modules if type(module).__name__ in separate]
    for name in names:
        model.set_submodule(name, nn.GELU(approximate="tanh"))
    return len(names)
