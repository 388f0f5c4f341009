"""Activation checkpointing: a layer's activations are not stored, and recomputed in the backward pass."""

import re
from functools import partial
from typing import Annotated, ClassVar

from pydantic import AfterValidator
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.base.technique import Mathematics, Stage, Step, Technique

POLICY = re.compile(r"none|every_layer|every_([2-9]|[1-9]\d+)_layers")

OPTIONS = {"use_reentrant": False}
"""Arguments of torch.utils.checkpoint; the non-reentrant variant supports hooks and keyword arguments."""


def _checked_policy(value: str) -> str:
    if POLICY.fullmatch(value) is None:
        raise ValueError("must be none, every_layer, every_2_layers, every_3_layers, ...")
    return value


class Checkpointing(Technique):
    """Checkpoint no layer, every layer, or every n-th layer."""

    stage: ClassVar[Stage] = Stage.RECOMPUTATION

    checkpointing: Annotated[str, AfterValidator(_checked_policy)] = "none"
    """Layers whose activations are recomputed: none, every_layer, every_2_layers, every_3_layers, ..."""

    @property
    def mathematics(self) -> Mathematics:
        """The recomputed activations, dropout included, are equal to the ones that are not stored."""
        return Mathematics.EXACT

    @property
    def every_n_layers(self) -> int | None:
        """The n of the checkpointed layers 0, n, 2n, ...; None without checkpointing."""
        if self.checkpointing == "none":
            return None
        number = re.search(r"\d+", self.checkpointing)
        return int(number.group()) if number else 1

    @property
    def layer_period(self) -> int:
        """The n of every n-th layer."""
        return self.every_n_layers or 1

    def apply(self, step: Step) -> Step:
        """Enable checkpointing by transformers' own method, or by torch.utils.checkpoint on the layers."""
        every = self.every_n_layers
        if every is None:
            return step
        module, layers = step.trainable.module, step.trainable.layers
        if hasattr(module, "activation_checkpointing_enable"):
            module.activation_checkpointing_enable(activation_checkpointing_kwargs=OPTIONS, every_n_layers=every)  # type: ignore[operator]
        elif hasattr(module, "gradient_checkpointing_enable"):
            _enable_with_old_name(module, layers, every)
        else:
            for layer in layers[::every]:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        return step


def _enable_with_old_name(module: nn.Module, layers: tuple[nn.Module, ...], every: int) -> None:
    """Enable checkpointing with an older transformers, which has no every_n_layers but reads a flag on each layer."""
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=OPTIONS)  # type: ignore[operator]
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0  # type: ignore[assignment]
