"""Scaled dot-product attention on CPU tensors by the kernel that a CUDA device would choose.

The rules are those of torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (priority_order and the can_use_*
functions) and attention.cpp, for tensors that are dense, as long as queries as keys, and need gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
CUDNN_FIRST = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities on which cuDNN's kernel comes first (check_prefer_cudnn_attention; cuDNN newer than 9.15.0)."""
FLASH_MULTIPLE = 8
"""The flash kernel pads the channels of a head to a multiple of it (pad_last_dim)."""

Attention = Callable[..., Tensor]


def attention_of(capability: tuple[int, int]) -> Attention:
    """Return scaled_dot_product_attention as a device of this compute capability computes it."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        kernel = choose_kernel(capability, query, key, value, attn_mask)
        scale = scale or query.shape[-1] ** -0.5
        heads = (query, key, value)
        if kernel == "cudnn":
            result = aten._scaled_dot_product_cudnn_attention(
                *heads, attn_mask, True, dropout_p, is_causal, False, scale=scale
            )
        elif kernel == "flash":
            padded = [F.pad(part, (0, -part.shape[-1] % FLASH_MULTIPLE)) for part in heads] if _ragged(query) else heads
            result = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
            return result[0][..., : query.shape[-1]] if _ragged(query) else result[0]  # type: ignore[no-any-return]
        elif kernel == "efficient":
            bias = None if attn_mask is None else _as_bias(attn_mask, query)
            result = aten._scaled_dot_product_efficient_attention(*heads, bias, True, dropout_p, is_causal, scale=scale)
        else:
            result = aten._scaled_dot_product_attention_math(
                *heads, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )
        return result[0]  # type: ignore[no-any-return]

    return attend


def choose_kernel(capability: tuple[int, int], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """Return `cudnn`, `flash`, `efficient` or `math`: the first supported kernel in the device's order."""
    channels = query.shape[-1]
    half = query.dtype == torch.float16 or (query.dtype == torch.bfloat16 and capability >= (8, 0))
    one_width = channels == key.shape[-1] == value.shape[-1]
    fused = capability >= (8, 0) and half and one_width
    if capability in CUDNN_FIRST and fused and channels <= 128 and channels % 8 == 0:
        return "cudnn"
    if fused and mask is None and channels <= 256 and (channels <= 192 or capability[1] == 0):
        return "flash"
    multiple = 8 if query.dtype != torch.float32 else 4
    if (half or query.dtype == torch.float32) and one_width and channels % multiple == 0 and _same_heads(query, key):
        return "efficient"
    return "math"


def _ragged(query: Tensor) -> bool:
    return query.shape[-1] % FLASH_MULTIPLE != 0


def _same_heads(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] == key.shape[1]


def _as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """Return the mask as an additive bias, for each head and pair of positions (convert_boolean_attn_mask)."""
    bias: Any = mask
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return bias.expand(query.shape[0], query.shape[1], *mask.shape[-2:])  # type: ignore[no-any-return]
