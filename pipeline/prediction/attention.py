"""Scaled dot-product attention on CPU tensors by the kernel that a CUDA device would choose.

The rules are those of torch 2.9 to 2.15, each with the cuDNN that it is built with: aten/src/ATen/native/transformers/
attention.cpp and cuda/sdp_utils.cpp (priority_order and the can_use_* functions), for dense tensors. They are compiled
into builds for CUDA only, so that a build for a CPU can tell them by its version alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.base.torch_version import TORCH_VERSION
from pipeline.prediction.sums_in_place import adding_in_place

aten = torch.ops.aten
CUDNN_FIRST = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities on which cuDNN's kernel comes first (check_prefer_cudnn_attention: a cuDNN newer than 9.15)."""
FLASH_MULTIPLE = 8
"""The flash kernel pads the channels of a head to a multiple of it (pad_last_dim)."""
BIAS_MULTIPLE = 8
"""Memory-efficient attention needs rows of the bias that begin at a multiple of it, in elements."""
FLASH_SMALL_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
"""Compute capabilities with less shared memory than flash's backward pass needs for some head sizes."""

Attention = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The arguments of a call of scaled_dot_product_attention that decide about its kernel."""

    query: Tensor
    """B x H x T x C; keys and values may have fewer heads and another length."""
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    """Whether several heads of the query may share a key and value (grouped-query attention)."""

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three tensors."""
        return self.query, self.key, self.value

    @property
    def channels(self) -> int:
        """Channels of a query's head."""
        return int(self.query.shape[-1])

    @property
    def one_width(self) -> bool:
        """Whether query, key and value have as many channels."""
        return self.channels == self.key.shape[-1] == self.value.shape[-1]

    @property
    def equal_heads(self) -> bool:
        """Whether query, key and value have as many heads."""
        return self.query.shape[1] == self.key.shape[1] == self.value.shape[1]

    @property
    def shared_heads(self) -> bool:
        """Whether each head of the keys serves as many heads of the query (check_grouped_query_attention)."""
        return self.enable_gqa and all(self.query.shape[1] % part.shape[1] == 0 for part in self.heads)

    @property
    def trains(self) -> bool:
        """Whether a backward pass may follow (input_requires_grad)."""
        return torch.is_grad_enabled() and any(part.requires_grad for part in self.heads)

    @property
    def adjacent_channels(self) -> bool:
        """Whether the last axes have stride 1 (check_last_dim_stride_equals_1_dense)."""
        parts = self.heads if self.mask is None else (*self.heads, self.mask)
        return all(part.stride(-1) == 1 for part in parts)

    def of_types(self, *dtypes: torch.dtype) -> bool:
        """Whether all have the same dtype, which is one of these."""
        return self.query.dtype in dtypes and self.query.dtype == self.key.dtype == self.value.dtype


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
        heads = (query, key, value)
        call = AttentionCall(
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            dropout=dropout_p,
            is_causal=is_causal,
            enable_gqa=enable_gqa,
        )
        kernel = choose_kernel(capability, call)
        scale = scale or query.shape[-1] ** -0.5
        bias = None if attn_mask is None else _as_bias(attn_mask, query)
        if kernel == "cudnn":
            result = aten._scaled_dot_product_cudnn_attention(
                *heads, bias, call.trains, dropout_p, is_causal, False, scale=scale
            )
        elif kernel == "flash":
            padded = [F.pad(part, (0, -part.shape[-1] % FLASH_MULTIPLE)) for part in heads] if _ragged(query) else heads
            result = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
            return result[0][..., : query.shape[-1]] if _ragged(query) else result[0]  # type: ignore[no-any-return]
        elif kernel == "efficient":
            bias = None if bias is None else _for_each_head(bias, query)
            result = aten._scaled_dot_product_efficient_attention(
                *heads, bias, call.trains, dropout_p, is_causal, scale=scale
            )
        else:
            with adding_in_place():
                result = aten._scaled_dot_product_attention_math(
                    *heads, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
                )
        return result[0]  # type: ignore[no-any-return]

    return attend


def choose_kernel(capability: tuple[int, int], call: AttentionCall, version: tuple[int, ...] = TORCH_VERSION) -> str:
    """Return `cudnn`, `flash`, `efficient` or `math`: the first that this version of torch supports, in its order."""
    if all(part.dim() == 4 and part.shape[0] == call.query.shape[0] for part in call.heads):
        if _cudnn_runs(capability, call, version):
            return "cudnn"
        if _flash_runs(capability, call):
            return "flash"
        if _efficient_runs(capability, call, version):
            return "efficient"
    return "math"


def _cudnn_runs(capability: tuple[int, int], call: AttentionCall, version: tuple[int, ...]) -> bool:
    """Whether can_use_cudnn_attention holds, on a device that prefers it."""
    whole_sixteenths = (call.dropout * 16).is_integer() or version < (2, 12)  # check_cudnn_dropout came with 2.12
    return (
        capability in CUDNN_FIRST
        and version >= (2, 11)  # the first with such a cuDNN
        and call.of_types(torch.float16, torch.bfloat16)
        and _cudnn_has_size(capability, call, version)
        and whole_sixteenths
        and call.key.shape[-2] != 1
        and not (call.dropout and call.query.shape[-2] == 1)
        and (call.equal_heads or call.shared_heads)
        and call.adjacent_channels
        and not (call.mask is not None and call.mask.requires_grad)
    )


def _cudnn_has_size(capability: tuple[int, int], call: AttentionCall, version: tuple[int, ...]) -> bool:
    """Whether cuDNN's kernel takes these channels (check_cudnn_tensor_shapes and, from 2.14 on, its _d256_bprop_)."""
    sizes = (call.channels, call.value.shape[-1])
    if any(size % 8 for size in sizes):
        return False
    if max(sizes) <= 128 or (sizes == (192, 128) and capability[0] == 10):
        return True
    if version < (2, 14):
        return capability == (9, 0) and max(sizes) <= 256
    return sizes in ((192, 128), (256, 256)) or (max(sizes) <= 256 and not call.trains)


def _flash_runs(capability: tuple[int, int], call: AttentionCall) -> bool:
    """Whether can_use_flash_attention holds."""
    fits = call.channels <= 192 or (call.channels > 224 and not call.dropout)
    return (
        capability >= (8, 0)
        and call.of_types(torch.float16, torch.bfloat16)
        and call.mask is None
        and call.one_width
        and call.channels <= 256
        and (fits or not call.trains or capability not in FLASH_SMALL_MEMORY)
        and not (call.is_causal and call.query.shape[-2] != call.key.shape[-2])
        and (call.equal_heads or call.shared_heads)
        and call.adjacent_channels
    )


def _efficient_runs(capability: tuple[int, int], call: AttentionCall, version: tuple[int, ...]) -> bool:
    """Whether can_use_mem_efficient_attention holds; channels are aligned as minimum_gemm_alignment says."""
    half = call.query.dtype != torch.float32
    multiple = 8 if half else 4 if capability >= (8, 0) else 1
    newer = (torch.bfloat16,) if capability >= (8, 0) else ()
    return (
        call.of_types(torch.float16, torch.float32, *newer)
        and call.channels == call.key.shape[-1]
        and call.channels % multiple == call.value.shape[-1] % multiple == 0
        and (call.equal_heads or (call.shared_heads and version >= (2, 14)))
        and call.adjacent_channels
    )


def _ragged(query: Tensor) -> bool:
    return query.shape[-1] % FLASH_MULTIPLE != 0


def _as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """Return the mask as an additive bias (convert_boolean_attn_mask)."""
    if mask.dtype != torch.bool:
        return mask
    options: dict[str, Any] = {"dtype": query.dtype, "device": mask.device}
    return torch.where(mask, torch.scalar_tensor(0.0, **options), torch.scalar_tensor(float("-inf"), **options))


def _for_each_head(bias: Tensor, query: Tensor) -> Tensor:
    """Return the bias for each head and pair of positions, with aligned rows (preprocess_mask and pad_bias)."""
    if any(stride % BIAS_MULTIPLE for stride in bias.stride()[:-1]):
        length = bias.shape[-1]
        bias = F.pad(bias, (0, BIAS_MULTIPLE - length % BIAS_MULTIPLE))[..., :length]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], bias.shape[-1])
