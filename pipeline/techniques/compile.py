"""torch.compile for each of the model's identical layers, which share one compiled graph."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pipeline.base.contracts import Hardware
from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique

ARGUMENTS: dict[str, Any] = {"dynamic": False, "options": {"fallback_random": True}}
"""Arguments of torch.compile: one shape, and dropout draws the numbers that it draws without compilation."""


class Compile(Technique):
    """Compile no layer, or each layer in place; the first optimizer steps take the compilation's time."""

    stage: ClassVar[Stage] = Stage.COMPILE

    compile: Literal["none", "layers"] = "none"
    """none, or layers: each of the identical layers by torch.compile."""

    @property
    def mathematics(self) -> Mathematics:
        """The same formulas in fused kernels, which round less often."""
        return Mathematics.EXACT if self.compile == "none" else Mathematics.ROUNDING

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[str, ...]:
        """Return no compilation: what it gains has not been measured on GPUs."""
        del setting, hardware
        return ("none",)

    @property
    def not_predicted(self) -> str | None:
        """What a prediction does not see: a trace has the operators that are compiled, not the kernels made of them."""
        if self.compile == "none":
            return None
        return "compile=layers: predicted as if it were not compiled: what compiled layers allocate cannot be traced"

    def unsupported(self, hardware: Hardware) -> str | None:
        """Return which compiler is missing."""
        if self.compile == "none":
            return None
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return f"compile=layers needs a C++ compiler, and {compiler} is not found; install one, or set compile=none"
        if hardware.kind == "cuda" and find_spec("triton") is None:
            return "compile=layers needs the package triton on a GPU, and it is not installed; set compile=none"
        return None

    def export(self, target: str) -> Exported | None:
        """Return the statements that compile the layers, for plain PyTorch; arguments of trainers compile the model."""
        return None

    def apply(self, step: Step) -> Step:
        """Compile the layers for the duration of the run."""
        return step if self.compile == "none" else step.with_run_context(partial(_compiled, step.trainable.layers))


@contextmanager
def _compiled(layers: tuple[nn.Module, ...]) -> Iterator[None]:
    """Compile the call of a layer, for all layers, unless a mode records operators: it would see compiled ones.

    torch.nn.Module.compile would leave out layers of torch's own classes, whose code is never compiled by itself.
    """
    if _get_current_dispatch_mode() is not None:
        yield
        return
    call = torch.compile(_call, **ARGUMENTS)
    for layer in layers:
        layer._compiled_call_impl = partial(call, layer)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def _call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
