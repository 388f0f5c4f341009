"""A linear layer that allocates what a 4-bit layer of bitsandbytes does, for tensors without values."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64
"""Weights that share a float32 scale (bitsandbytes, quantize_4bit)."""
NUM_CODES = 16
COMPUTE_DTYPE = torch.float16


class FourBitLinear(nn.Linear):
    """A frozen linear layer with 4-bit weights, which computes in float16 (bitsandbytes, Linear4bit)."""

    def __init__(self, linear: nn.Linear, *, clones: bool) -> None:
        """Take the shape of `linear`; `clones` says whether its result is copied, as peft does below an adapter."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._clones = clones

    def quantize(self, weight: Tensor) -> None:
        """Replace the weight by a packed one with scales and codes, allocated in bitsandbytes' order."""
        self.register_buffer("scales", weight.new_empty(-(-weight.numel() // BLOCK), dtype=torch.float32))
        packed = weight.new_empty(((weight.numel() + 1) // 2, 1), dtype=torch.uint8)
        self.register_buffer("codes", weight.new_empty(NUM_CODES, dtype=torch.float32))
        self.codes.abs().max()
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the product in the type of the inputs."""
        if self.bias is not None and self.bias.dtype != COMPUTE_DTYPE:
            self.bias.data = self.bias.data.to(COMPUTE_DTYPE)
        shape = (self.out_features, self.in_features)
        result = _Product.apply(inputs.to(COMPUTE_DTYPE), self.weight, self.bias, shape).to(inputs.dtype)
        return result.clone() if self._clones else result


class _Product(torch.autograd.Function):
    """A product with a weight that is unpacked for it, again in the backward pass (bitsandbytes, MatMul4Bit)."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Tensor:
        ctx.shape, ctx.packed = shape, packed
        return F.linear(inputs, packed.new_empty(shape, dtype=inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient @ ctx.packed.new_empty(ctx.shape, dtype=gradient.dtype), None, None, None
