"""The kernel of a language model's loss: with all logits in memory, or with those of one chunk of tokens at a time."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from pipeline.base.chunked_loss import chunked_cross_entropy
from pipeline.base.contracts import Batch, Hardware, Head, Model
from pipeline.base.heads import hidden_states, shifted_targets
from pipeline.base.sequences import IGNORED_LABEL
from pipeline.base.technique import Mathematics, Stage, Step, Technique

LONGEST_CHUNK_TOKENS = 1024
"""Rows from which on a GPU's matrix products are limited by arithmetic, not by reading weight and gradient: about the
ratio of an H100's dense bf16 FLOP/s (989e12) to its bytes a second (3.35e12), times the 16 bytes that a chunk moves for
each weight over the 6 FLOPs that it computes (NVIDIA's H100 datasheet)."""

Kernel = Callable[[Tensor, nn.Linear, Tensor], Tensor]
"""(hidden states [N, C], head, targets [N]) -> summed cross-entropy."""


class LossKernel(Technique):
    """The cross-entropy from all logits at once, or from chunks of tokens whose logits are never stored."""

    stage: ClassVar[Stage] = Stage.LOSS

    loss_kernel: Literal["full", "chunked", "fused", "liger"] = "full"
    """full: all logits; chunked: chunks of tokens; fused: torch's linear_cross_entropy; liger: Liger's kernel."""
    loss_chunk_tokens: PositiveInt | None = None
    """Tokens of a chunk; none: chunked takes the head's width, at most 1024, and fused what torch chooses."""

    @property
    def mathematics(self) -> Mathematics:
        """Equal but for the order of sums; Liger's kernel rounds the gradient of the logits to 16 bits."""
        return Mathematics.ROUNDING if self.loss_kernel == "liger" else Mathematics.EXACT

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[Any, ...]:
        """Return the kernels worth trying: those of torch."""
        if setting != "loss_kernel":
            return super().values_to_try(setting, hardware)
        return ("full", "chunked", *(("fused",) if has_fused() else ()))

    def unsupported(self, hardware: Hardware) -> str | None:
        """Return why the device or an installed package does not support the kernel, or None if they do."""
        if self.loss_kernel == "fused" and not has_fused():
            return (
                "loss_kernel=fused needs torch.nn.functional.linear_cross_entropy, which torch "
                f"{torch.__version__} has not; install torch 2.13, or set loss_kernel=chunked"
            )
        if self.loss_kernel != "liger":
            return None
        if hardware.kind != "cuda":
            return f"loss_kernel=liger needs a CUDA GPU, and the device is {hardware.kind}; set loss_kernel=chunked"
        if find_spec("liger_kernel") is None:
            return (
                "loss_kernel=liger needs the package liger-kernel, which is not installed; install it, or set "
                "loss_kernel=chunked"
            )
        return None

    def unsuited(self, model: Model, name: str) -> str | None:
        """Return why the loss of a model cannot be computed apart from the rest of it, or None if it can."""
        if self.loss_kernel == "full":
            return None
        reason = model.inseparable_head(name)
        return reason and f"loss_kernel={self.loss_kernel} needs a head of its own: {reason}; set loss_kernel=full"

    def conflict(self, settings: Any) -> str | None:
        """Refuse chunks of a kernel without chunks, chunks larger than the batch, and sums of gradients in 16 bits."""
        chunk, tokens = self.loss_chunk_tokens, settings.micro_batch_size * settings.sequence_length
        if chunk is not None and self.loss_kernel in ("full", "liger"):
            return (
                f"loss_chunk_tokens is a setting of loss_kernel chunked and fused, and loss_kernel is "
                f"{self.loss_kernel}; set loss_kernel=chunked, or loss_chunk_tokens=none"
            )
        if chunk is not None and chunk > tokens:
            return (
                f"loss_chunk_tokens must not exceed the tokens of a micro-batch: {chunk} is more than "
                f"{settings.micro_batch_size} sequences x {settings.sequence_length} tokens; set "
                f"loss_chunk_tokens={tokens} or less, or none"
            )
        if self.loss_kernel == "fused" and settings.precision in ("bf16", "fp16"):
            return (
                "loss_kernel=fused needs precision=fp32 or tf32, since torch's linear_cross_entropy sums the head's "
                f"gradient over chunks in the type of its inputs, and precision is {settings.precision}; set "
                "loss_kernel=chunked"
            )
        return None

    def apply(self, step: Step) -> Step:
        """Replace the loss by one that calls the model without its head."""
        head = step.trainable.head
        if self.loss_kernel == "full" or head is None:
            return step
        kernels = {"chunked": _chunked, "fused": _fused, "liger": _liger}
        kernel = partial(kernels[self.loss_kernel], soft_cap=head.soft_cap, chunk=self.loss_chunk_tokens)
        return replace(step, trainable=replace(step.trainable, loss=partial(_loss, head, kernel)))


def has_fused() -> bool:
    """Whether torch has linear_cross_entropy, from version 2.13 on."""
    return hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")


def default_chunk_tokens(width: int) -> int:
    """Return the tokens of a chunk: the head's width, so that a chunk's logits are as large as the head's weight."""
    return min(width, LONGEST_CHUNK_TOKENS)


def _loss(head: Head, kernel: Kernel, module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
    """Return the summed loss divided by the window's number of targets, as the model's own."""
    hidden_NC = hidden_states(head, module, batch).flatten(0, 1)
    return kernel(hidden_NC, head.layer, shifted_targets(batch)) / num_targets


def _chunked(
    hidden_NC: Tensor, layer: nn.Linear, targets_N: Tensor, soft_cap: float | None, chunk: int | None
) -> Tensor:
    chunk_tokens = chunk or default_chunk_tokens(layer.in_features)
    return chunked_cross_entropy(hidden_NC, layer.weight, layer.bias, targets_N, chunk_tokens, soft_cap, IGNORED_LABEL)


def _fused(hidden_NC: Tensor, layer: nn.Linear, targets_N: Tensor, soft_cap: float | None, chunk: int | None) -> Tensor:
    del soft_cap  # refused
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    return F.linear_cross_entropy(
        hidden_NC,
        layer.weight,
        targets_N,
        linear_bias=layer.bias,
        reduction="sum",
        ignore_index=IGNORED_LABEL,
        options=options,
    )


def _liger(hidden_NC: Tensor, layer: nn.Linear, targets_N: Tensor, soft_cap: float | None, chunk: int | None) -> Tensor:
    del chunk  # its own
    functions = import_module("liger_kernel.transformers.functional")
    loss: Tensor = functions.liger_fused_linear_cross_entropy(
        hidden_NC,
        layer.weight,
        targets_N,
        bias=layer.bias,
        ignore_index=IGNORED_LABEL,
        reduction="sum",
        softcap=soft_cap,
        accum_dtype=torch.float32,
    )
    return loss
