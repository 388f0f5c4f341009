"""The number format of the weights; gradients and optimizer state have that of their parameter."""

import inspect
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from pipeline.base.contracts import BF16_CAPABILITY, Hardware, Trainable
from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique

IMPORTS = "from typing import Any\n\nimport torch\nfrom torch import nn\n"
"""What convert_to_bfloat16() needs in an exported file."""


class Weights(Technique):
    """Parameters, and so their gradients and optimizer state, in float32 or in bfloat16."""

    stage: ClassVar[Stage] = Stage.WEIGHTS

    weights: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters. With bfloat16, precision=fp32 means no autocast: all but the loss is in bfloat16."""

    @property
    def mathematics(self) -> Mathematics:
        """Weights that are rounded after each update are another training."""
        return Mathematics.DIFFERENT if self.active else Mathematics.EXACT

    @property
    def number_format(self) -> str | None:
        """Bfloat16, if the weights are, also without autocast."""
        return "bf16" if self.active else None

    def unsupported(self, hardware: Hardware) -> str | None:
        """Return that the GPU is older than bfloat16, or None if it is not."""
        if not self.active or hardware.capability is None or hardware.capability >= BF16_CAPABILITY:
            return None
        return (
            f"weights=bfloat16 needs compute capability 8.0 (Ampere) or newer, and {hardware.name} is older; set "
            "weights=float32"
        )

    def conflict(self, settings: Any) -> str | None:
        """Return what has no meaning beside weights in bfloat16."""
        if not self.active:
            return None
        if settings.precision == "fp16":
            return (
                "weights=bfloat16 needs no loss scaling, and precision=fp16 scales the loss and rounds the weights a "
                "second time; set precision=bf16 or fp32, or weights=float32"
            )
        if settings.precision == "tf32":
            return (
                "weights=bfloat16 leaves no matrix product in float32, and precision=tf32 changes only those; set "
                "precision=bf16 or fp32, or weights=float32"
            )
        if settings.loss_kernel == "fused":
            return (
                "weights=bfloat16 needs a loss that is summed in float32, and loss_kernel=fused sums it in the type of "
                "its inputs (torch's linear_cross_entropy); set loss_kernel=chunked"
            )
        return None

    def export(self, target: str) -> Exported | None:
        """Return the function that converts the model; axolotl has a key, DeepSpeed takes it only beside float32."""
        if target == "deepspeed":
            return None
        if target == "axolotl":
            return Exported()
        code = f"{IMPORTS}\n\n{inspect.getsource(convert_to_bfloat16)}"
        return Exported(code=code, prepare="convert_to_bfloat16(model)")

    def on_host(self, trainable: Trainable) -> None:
        """Convert the model."""
        if self.active:
            convert_to_bfloat16(trainable.module)

    def apply(self, step: Step) -> Step:
        """Return the step as it is: the model has been converted already."""
        return step


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
