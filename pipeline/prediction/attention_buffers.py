"""What the backward passes of the fused attention kernels allocate besides the gradients, which come first.

Axes: B sequences, H heads, T tokens, C channels of a head; keys may have fewer heads and another length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.memory.blocks import round_up
from pipeline.memory.inside import Buffer, Inside


def flash_backward(query: Tensor, key: Tensor) -> Inside:
    """Return softmax_d, dq_accum and, if heads share keys, dk and dv of every head.

    They are those of mha_bwd in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    batch, heads, length, channels = query.shape
    rounded = round_up(channels, 32 if channels <= 128 else 64)
    rows = 4 * batch * heads * round_up(length, 128)
    softmax, gradient = Buffer(rows), Buffer(rows * rounded)
    expanded = batch * key.shape[2] * heads * channels * key.element_size() if heads != key.shape[1] else 0
    parts = (Buffer(expanded), Buffer(expanded)) if expanded else ()
    return Inside(after=(softmax, gradient, *parts, *parts, gradient, softmax))


def cudnn_backward(query: Tensor) -> Inside:
    """Return the workspace of cuDNN's attention: a float32 gradient of the query, and a number for each row.

    cuDNN reports it to run_cudnn_SDP_bprop (aten/src/ATen/native/cudnn/MHA.cpp); its own engines may need more.
    """
    batch, heads, length, channels = query.shape
    workspace = Buffer(4 * batch * heads * length * (channels + 1))
    return Inside(after=(workspace, workspace))


def efficient_backward(query: Tensor, key: Tensor, dropout: float, capability: tuple[int, int]) -> Inside:
    """Return the row sums of output x gradient, and the workspace, of memory-efficient attention.

    In float32 torch itself computes the sums. The source is _efficient_attention_backward in
    aten/src/ATen/native/transformers/cuda/attention_backward.cu.
    """
    batch, heads, length, channels = query.shape
    blocks = _blocks_of(query, dropout, capability)
    elements = blocks.workspace_elements(batch * heads, length, key.shape[2], channels)
    sums, workspace = Buffer(4 * batch * heads * length), Buffer(4 * batch * heads * round_up(elements, 4))
    if query.dtype != torch.float32:
        return Inside(after=(sums, workspace, sums, workspace))
    product, rows = Buffer(4 * query.numel()), Buffer(sums.num_bytes)
    return Inside(after=(product, rows, sums, rows, product, workspace, sums, workspace))


@dataclass(frozen=True)
class _Blocks:
    """The sizes of the blocks of queries and keys that a kernel works on."""

    queries: int
    keys: int
    accumulates: bool
    """Whether the gradients of keys and values are summed in the workspace, in float32."""

    def workspace_elements(self, batch_heads: int, length: int, key_length: int, channels: int) -> int:
        """Return the float32 elements for each head (mem_eff_attention/kernel_backward.h, workspace_strideBH)."""
        elements = -(-length // self.queries) * -(-channels // self.keys) * (self.queries * self.keys + 4)
        if not self.accumulates:
            return elements
        splits = max(1, min(-(-key_length // self.keys), 200 // batch_heads))
        if batch_heads >= 256 and key_length <= 2 * self.keys:
            splits = 1
        return elements + 2 * splits * self.keys * round_up(channels, self.queries)


def _blocks_of(query: Tensor, dropout: float, capability: tuple[int, int]) -> _Blocks:
    """Return the blocks of the first kernel that fits (mem_eff_attention/kernels/generate_kernels.py)."""
    channels = query.shape[-1]
    large_memory = capability in ((8, 0), (8, 7)) or capability[0] in (9, 10)
    if channels <= 64:
        return _Blocks(64, 64, False)
    if query.dtype == torch.float32:
        return _Blocks(128 if large_memory else 64, 64, False)
    if channels > 128:
        return _Blocks(128, 64, True)
    if capability < (8, 0) or (capability in ((8, 6), (8, 9)) and channels <= 96 and not dropout):
        return _Blocks(128, 64, False)
    return _Blocks(128, 128, False) if large_memory else _Blocks(64, 64, True)
