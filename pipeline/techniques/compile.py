"""torch.compile for each of the model's identical layers, which share one compiled graph."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pipeline.base.contracts import Hardware, Model
from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique, source_of, without_layers

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
        return ("none",)

    def notes(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield that fake tensors see the operators that are compiled, not the kernels made of them."""
        if self.compile == "layers" and hardware.kind == "cpu":
            yield "compile=layers: predicted as if it were not compiled: what compiled layers allocate cannot be traced"

    @property
    def untimed(self) -> tuple[str, ...]:
        """The setting itself: the work is counted without compilation."""
        return () if self.compile == "none" else ("compile",)

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield which technique runs code in the layers that is never compiled, or which compiler is missing."""
        if self.compile == "none":
            return
        offloads = "activation_offloading=true" if settings.activation_offloading else None
        if "offloaded" in settings.checkpointing:
            offloads = f"checkpointing={settings.checkpointing}"
        if offloads is not None:
            yield (
                "what copies tensors to the host is never compiled, so that a compiled layer would be many graphs and "
                f"be compiled again, and {offloads} is set with compile={self.compile}; set compile=none or "
                f"{'checkpointing=every_layer' if 'checkpointing' in offloads else 'activation_offloading=false'}"
            )
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            yield f"compile=layers needs a C++ compiler, and {compiler} is not found; install one, or set compile=none"
        if hardware.kind == "cuda" and find_spec("triton") is None:
            yield "compile=layers needs the package triton on a GPU, and it is not installed; set compile=none"
        yield from without_layers(self, settings, model)

    def export(self, target: str) -> Exported | None:
        """Return the statements that compile the layers, for plain PyTorch, and torchtitan's own way of it.

        Arguments of other trainers compile the whole model.
        """
        if target == "torchtitan":
            return Exported(arguments={"compile.enable": True, "compile.components": ["model"]})
        if target != "pytorch":
            return None
        arguments = ", ".join(f"{name}={value!r}" for name, value in ARGUMENTS.items())
        return Exported(
            code=source_of(compile_layers, _call),
            prepare=f"compile_layers([model.get_submodule(name) for name in {{layers}}], {arguments})",
        )

    def apply(self, step: Step) -> Step:
        """Compile the layers for the duration of the run."""
        return step if self.compile == "none" else step.with_run_context(partial(_compiled, step.trainable.layers))


@contextmanager
def _compiled(layers: tuple[nn.Module, ...]) -> Iterator[None]:
    """Compile the layers, unless a mode records operators: it would see compiled ones."""
    if _get_current_dispatch_mode() is not None:
        yield
        return
    compile_layers(layers, **ARGUMENTS)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def compile_layers(layers: Iterable[nn.Module], **arguments: Any) -> None:
    """Compile the call of a layer, for all layers, with these arguments of torch.compile.

    torch.nn.Module.compile would leave out layers of torch's own classes, whose code is never compiled by itself, and
    layers whose forward method is a checkpoint.
    """
    call = torch.compile(_call, **arguments)
    for layer in layers:
        layer._compiled_call_impl = partial(call, layer)


def _call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
