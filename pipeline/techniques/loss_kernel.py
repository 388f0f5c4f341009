"""The kernel of a language model's loss: with all logits in memory, or with those of one chunk of tokens at a time."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from pipeline.base.contracts import Batch, Hardware, Model
from pipeline.base.errors import InvalidInputError
from pipeline.base.ranks import whole
from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique
from pipeline.base.user_functions import once_of_each
from pipeline.models._support.heads import hidden_states, shifted_targets
from pipeline.techniques._support.lora import adapted_modules
from pipeline.techniques._support.loss_kernels import KERNELS, exported_loss

LONGEST_CHUNK_TOKENS = 1024
"""Longest chunk by default: more tokens cost memory and save no time on a GPU.

For each weight and token a chunk computes 6 FLOPs; for each weight it moves 16 bytes (two products read it, one is
written and read, the sum is read and written). An H100 computes 989e12 dense bf16 FLOP/s and moves 3.35e12 bytes a
second (NVIDIA's datasheet): from 787 tokens on the products take longer than what is moved.
"""

LIGER_ALONE = {
    "rope": False,
    "swiglu": False,
    "geglu": False,
    "rms_norm": False,
    "layer_norm": False,
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
}
"""Which of Liger's kernels TrainingArguments takes; a model takes those that it has."""
LIGER_IN_AXOLOTL = {
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "liger_rope": False,
    "liger_rms_norm": False,
    "liger_layer_norm": False,
    "liger_glu_activation": False,
    "liger_cross_entropy": False,
    "liger_fused_linear_cross_entropy": True,
}
"""The same in axolotl's file."""


class LossKernel(Technique):
    """The cross-entropy from all logits at once, or from chunks of tokens whose logits are never stored."""

    stage: ClassVar[Stage] = Stage.LOSS

    loss_kernel: Literal["full", "chunked", "fused", "liger"] = "full"
    """full: all logits; chunked: chunks of tokens; fused: torch's linear_cross_entropy; liger: Liger's kernel."""
    loss_chunk_tokens: PositiveInt | None = None
    """Tokens of a chunk, of chunked and fused; none: the head's width, at most 1024."""

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

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield what the kernel cannot compute: these chunks, on this device, in this format, or the model's head."""
        kernel, chunk = self.loss_kernel, self.loss_chunk_tokens
        tokens = settings.micro_batch_size * settings.sequence_length
        if chunk is not None and kernel in ("full", "liger"):
            yield (
                f"loss_chunk_tokens is a setting of loss_kernel chunked and fused, and loss_kernel is {kernel}; set "
                "loss_kernel=chunked, or loss_chunk_tokens=none"
            )
        if chunk is not None and chunk > tokens:
            yield (
                f"loss_chunk_tokens must not exceed the tokens of a micro-batch: {chunk} is more than "
                f"{settings.micro_batch_size} sequences x {settings.sequence_length} tokens; set "
                f"loss_chunk_tokens={tokens} or less, or none"
            )
        if kernel == "fused" and settings.precision in ("bf16", "fp16"):
            yield (
                "loss_kernel=fused needs precision=fp32 or tf32, since torch's linear_cross_entropy sums the head's "
                f"gradient over chunks in the type of its inputs, and precision is {settings.precision}; set "
                "loss_kernel=chunked"
            )
        if kernel == "fused" and not has_fused():
            yield (
                "loss_kernel=fused needs torch.nn.functional.linear_cross_entropy, which torch "
                f"{torch.__version__} has not; install torch 2.13, or set loss_kernel=chunked"
            )
        if kernel == "liger" and hardware.kind != "cuda":
            yield f"loss_kernel=liger needs a CUDA GPU, and the device is {hardware.kind}; set loss_kernel=chunked"
        if kernel == "liger" and find_spec("liger_kernel") is None:
            yield (
                "loss_kernel=liger needs the package liger-kernel, which is not installed; install it, or set "
                "loss_kernel=chunked"
            )
        if kernel != "full" and (reason := model.inseparable_head(settings.model, kernel != "fused")):
            yield f"loss_kernel={kernel} needs a head that it can compute itself, and {reason}; set loss_kernel=full"
        elif (
            kernel != "full"
            and settings.adapter != "none"
            and _adapts_head(model, settings.model, settings.adapter_targets)
        ):
            yield (
                f"loss_kernel={kernel} multiplies by the head's own weight, and the head has an adapter "
                f"(adapter_targets={settings.adapter_targets}); set loss_kernel=full, or take the head out of "
                "adapter_targets"
            )

    def export(self, target: str) -> Exported | None:
        """Return the loss as code; the plain script calls it, and elsewhere the model itself returns it.

        TRL has chunks of its own, which no setting turns off; axolotl's chunks are of logits that are all in memory.
        """
        if target == "trl":
            return None if self.loss_kernel == "liger" else Exported()
        if target == "torchtitan":
            return Exported() if self.loss_kernel == "chunked" else None
        if target == "axolotl":
            return Exported(arguments=LIGER_IN_AXOLOTL) if self.loss_kernel == "liger" else None
        if (self.loss_kernel, target) == ("liger", "training_arguments"):
            return Exported(arguments={"use_liger_kernel": True, "liger_kernel_config": LIGER_ALONE})
        chunk = self.loss_chunk_tokens or f"min(head.in_features, {LONGEST_CHUNK_TOKENS})"
        code = exported_loss(self.loss_kernel, str(chunk))
        if target == "pytorch":
            return Exported(code=code, loss="summed_loss_without_logits(model, ids_BT, labels_BT, factor)")
        notes = (
            "prepare_model, or make_trainer, replaces the model's forward method: its output has a loss and no logits.",
            "In fp16 it rounds the gradients of the logits before they are multiplied by the loss scale, which only "
            "train.py hands over: small ones are lost; train in bf16.",
        )
        return Exported(code=code, prepare="compute_loss_without_logits(model)", notes=notes)

    def apply(self, step: Step) -> Step:
        """Replace the loss by one that calls the model without its head; a model without one was refused.

        Raises:
            InvalidInputError: it is Liger's kernel, on a CPU.

        """
        head = step.trainable.head
        if self.loss_kernel == "full":
            return step
        assert head is not None
        if self.loss_kernel == "liger" and step.device.type != "cuda":
            raise InvalidInputError("Liger's kernel runs on a GPU alone; set loss_kernel=chunked, or another device")
        kernel, layer, soft_cap = KERNELS[self.loss_kernel], head.layer, head.soft_cap
        chunk_tokens = self.loss_chunk_tokens or default_chunk_tokens(layer.in_features)

        def loss(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
            hidden_NC = hidden_states(head, module, batch).flatten(0, 1)
            factor = step.scaler.scale(torch.ones((), device=hidden_NC.device) / num_targets)
            targets_N = shifted_targets(batch)
            weight, bias = whole(layer.weight), None if layer.bias is None else whole(layer.bias)
            return kernel(hidden_NC, weight, bias, targets_N, chunk_tokens, soft_cap, factor) / num_targets

        return replace(step, trainable=replace(step.trainable, loss=loss))


@once_of_each
def _adapts_head(model: Model, name: str, targets: str) -> bool:
    """Whether the head of model `name` is one of the modules that get an adapter."""
    built = model.structure(name)
    return built.head is not None and built.head.layer in adapted_modules(built.module, built.layers, targets)


def has_fused() -> bool:
    """Whether torch has linear_cross_entropy, from version 2.13 on."""
    return hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")


def default_chunk_tokens(width: int) -> int:
    """Return the tokens of a chunk: the head's width, so that a chunk's logits are as large as the head's weight."""
    return min(width, LONGEST_CHUNK_TOKENS)
