"""The number format of the weights; gradients and optimizer state have that of their parameter."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from pipeline.base.contracts import BF16_CAPABILITY, Hardware, Model
from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique, source_of
from pipeline.techniques._support.optimizers import with_master_weights

OF_TORCHTITAN = "torchtitan keeps the parameters themselves in float32, and computes with copies of them in bfloat16."
OF_DEEPSPEED = (
    "bf16 is DeepSpeed's training with float32 copies in the optimizer; without ZeRO it also adds up gradients in "
    "float32, which takes 4 bytes a parameter more than measured."
)


class Weights(Technique):
    """Parameters, and so their gradients and optimizer state, in float32 or in bfloat16.

    With bfloat16_master parameters and gradients are in bfloat16, and the optimizer updates float32 copies, as in
    DeepSpeed's and Megatron's training in bf16: 4 + 12 bytes a parameter with AdamW, and 4 more during the update.
    """

    stage: ClassVar[Stage] = Stage.WEIGHTS

    weights: Literal["float32", "bfloat16", "bfloat16_master"] = "float32"
    """float32; bfloat16, where precision=fp32 means no autocast; or bfloat16_master: the optimizer has float32 copies.
    """

    @property
    def mathematics(self) -> Mathematics:
        """Weights that are rounded after each update are another training; copies in float32 are not rounded."""
        if self.weights == "bfloat16_master":
            return Mathematics.ROUNDING
        return Mathematics.DIFFERENT if self.active else Mathematics.EXACT

    @property
    def number_format(self) -> str | None:
        """Bfloat16, if the weights are, also without autocast."""
        return "bf16" if self.active else None

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield what has no meaning beside weights in bfloat16, or that the GPU is older."""
        if not self.active:
            return
        if settings.precision == "fp16":
            yield (
                f"weights={self.weights} needs no loss scaling, and precision=fp16 scales the loss and rounds the "
                "weights a second time; set precision=bf16 or fp32, or weights=float32"
            )
        if settings.precision == "tf32":
            yield (
                f"weights={self.weights} leaves no matrix product in float32, and precision=tf32 changes only those; "
                "set precision=bf16 or fp32, or weights=float32"
            )
        if settings.loss_kernel == "fused":
            yield (
                f"weights={self.weights} needs a loss that is summed in float32, and loss_kernel=fused sums it in the "
                "type of its inputs (torch's linear_cross_entropy); set loss_kernel=chunked"
            )
        if self.weights == "bfloat16_master" and settings.optimizer_in_backward:
            yield (
                "optimizer_in_backward updates what has a gradient, and weights=bfloat16_master copies of it; set "
                "optimizer_in_backward=false or weights=bfloat16"
            )
        if hardware.is_older_than(BF16_CAPABILITY):
            yield (
                f"weights={self.weights} needs compute capability 8.0 (Ampere) or newer, and {hardware.name} is older; "
                "set weights=float32"
            )

    def export(self, target: str) -> Exported | None:
        """Return the function that converts the model; axolotl and torchtitan have keys.

        DeepSpeed takes it only beside float32.
        """
        has_master = self.weights == "bfloat16_master"
        if target == "deepspeed":
            return Exported(arguments={"bf16": {"enabled": True}}, notes=(OF_DEEPSPEED,)) if has_master else None
        if target == "torchtitan":
            in_float32 = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
            return Exported(arguments=in_float32, notes=(OF_TORCHTITAN,)) if has_master else Exported()
        if target == "axolotl":
            return None if has_master else Exported()
        functions = [convert_to_bfloat16, *([with_master_weights] if has_master else [])]
        return Exported(
            code=source_of(*functions),
            prepare="convert_to_bfloat16(model)",
            finished_optimizer="with_master_weights({optimizer})" if has_master else "{optimizer}",
        )

    def apply(self, step: Step) -> Step:
        """Convert the model, and let the optimizer update float32 copies."""
        if self.active:
            convert_to_bfloat16(step.trainable.module)
        return step.with_changed_optimizer(with_master_weights) if self.weights == "bfloat16_master" else step


def convert_to_bfloat16(model: nn.Module) -> None:
    """Convert a model's parameters and, in each forward pass, its inputs; buffers such as rotary frequencies stay."""

    def converted(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16) if is_float else value

    for parameter in model.parameters():
        parameter.data = converted(parameter.data)
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (tuple(map(converted, args)), {name: converted(kwargs[name]) for name in kwargs}),
        with_kwargs=True,
    )
