"""Number formats of the forward and backward pass; weights and optimizer state stay as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field

from pipeline.base.contracts import BF16_CAPABILITY, Hardware, Model
from pipeline.base.technique import Mathematics, Step, Technique

TRIED_ON = {"older cpu": ("fp32",), "cpu": ("fp32", "bf16"), "older cuda": ("fp32", "fp16"), "cuda": ("fp32", "bf16")}
"""Formats that `precision: auto` tries: fp16 is slow on a CPU, bf16 on one without instructions for it, and fp16 is not
needed where a GPU has bf16.
"""
AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Precision(Technique):
    """fp32, tf32 matrix products, or autocast to fp16 (with loss scaling) or bf16."""

    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    """Number format of the forward and backward pass."""
    initial_loss_scale: float = Field(default=65536.0, gt=0)
    """First scale of fp16's dynamic loss scaling."""

    @property
    def mathematics(self) -> Mathematics:
        """Exact in fp32; every other format rounds differently."""
        return Mathematics.EXACT if self.precision == "fp32" else Mathematics.ROUNDING

    @property
    def number_format(self) -> str:
        """The setting."""
        return self.precision

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[Any, ...]:
        """Return the formats worth trying on `hardware`."""
        if setting != "precision":
            return super().values_to_try(setting, hardware)
        if hardware.kind == "cpu":
            is_older = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        else:
            is_older = hardware.is_older_than(BF16_CAPABILITY)
        return TRIED_ON[f"older {hardware.kind}" if is_older else hardware.kind]

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield why the device cannot compute in this format."""
        if self.precision == "tf32" and hardware.kind != "cuda":
            yield (
                "tf32 needs a CUDA GPU of compute capability 8.0 (Ampere) or newer, and the device is "
                f"{hardware.kind}; set precision=fp32"
            )
        if self.precision in ("tf32", "bf16") and hardware.is_older_than(BF16_CAPABILITY):
            yield (
                f"{self.precision} needs compute capability 8.0 (Ampere) or newer, and {hardware.name} is older; set "
                "precision=fp16"
            )

    def apply(self, step: Step) -> Step:
        """Autocast the forward pass, scale fp16's loss, and set the format of float32 matrix products."""
        device_type = step.device.type
        step = step.with_run_context(partial(_float32_products, "high" if self.precision == "tf32" else "highest"))
        if self.precision == "fp16":
            step = replace(step, scaler=torch.amp.GradScaler(device_type, init_scale=self.initial_loss_scale))
        if self.precision in AUTOCAST_DTYPES:
            step = step.with_forward_context(
                partial(torch.autocast, device_type, dtype=AUTOCAST_DTYPES[self.precision])
            )
        return step


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    """Set the precision of float32 matrix products, tf32 (`high`) or full float32 (`highest`), and restore it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
