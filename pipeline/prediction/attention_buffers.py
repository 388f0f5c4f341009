"""What the fused attention kernels allocate besides their results, which come first.

Axes: B sequences, H heads, T tokens, C channels of a head; keys may have fewer heads and another length.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.memory.blocks import round_up
from pipeline.memory.inside import NOTHING, Buffer, Inside

WIDEST_ROW = 128
"""Most channels of which a kernel of memory-efficient attention keeps the output in registers."""


def flash_forward(query: Tensor, key: Tensor, dropout: float, num_multiprocessors: int) -> Inside:
    """Return the partial results of the parts of the keys, if there are too few heads and rows to divide.

    They are those of set_params_splitkv in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    if dropout:
        return NOTHING
    batch, heads, length, channels = query.shape
    block = 256 if channels <= 64 else 128 if channels <= 128 else 64
    sums, output = (
        Buffer(flash_part_bytes(*form, num_multiprocessors=num_multiprocessors), form, torch.float32)
        for form in ((batch * heads, length, key.shape[2], block, width) for width in (1, _rounded_channels(channels)))
    )
    return Inside(after=(sums, output, output, sums))


def flash_part_bytes(
    batch_heads: int, length: int, key_length: int, block: int, width: int, *, num_multiprocessors: int
) -> int:
    """Return the bytes of the partial results of `width` columns, for keys in blocks; 0 if keys are not divided."""
    tiles = batch_heads * -(-length // 64)
    splits = _key_splits(tiles, 2 * num_multiprocessors, -(-key_length // block))
    return 4 * splits * batch_heads * length * width if splits > 1 else 0


def _key_splits(tiles: int, places: int, blocks: int) -> int:
    """Return the fewest parts of the keys that keep 85 % as many places busy as the best (num_splits_heuristic)."""
    if tiles >= 0.8 * places:
        return 1
    counts = range(1, min(128, places, blocks) + 1)
    eligible = [n for n in counts if n == 1 or -(-blocks // n) != -(-blocks // (n - 1))]
    efficiency = {n: tiles * n / places / -(-tiles * n // places) for n in eligible}
    return next(n for n in eligible if efficiency[n] >= 0.85 * max(efficiency.values()))


def _rounded_channels(channels: int) -> int:
    """Return the channels of a head as the flash kernels compute them (head_size_rounded)."""
    return round_up(channels, 32 if channels <= 128 else 64)


def flash_backward(gradient: Tensor, query: Tensor, key: Tensor, output: Tensor) -> Inside:
    """Return softmax_d, dq_accum and, if heads share keys, dk and dv of every head.

    What is not contiguous by tokens is copied before. The source is mha_bwd in
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    batch, heads, length, channels = query.shape
    rows = 4 * batch * heads * round_up(length, 128)
    softmax, query_gradient = Buffer(rows), Buffer(rows * _rounded_channels(channels))
    copies, parts = (*_copy(gradient), *_copy(output)), _of_every_head(query, key)
    return Inside(before=copies, after=(softmax, query_gradient, *parts, *parts, query_gradient, softmax, *copies))


def cudnn_backward(query: Tensor) -> Inside:
    """Return the workspace of cuDNN's attention: a float32 gradient of the query, and a number for each row.

    cuDNN reports it to run_cudnn_SDP_bprop (aten/src/ATen/native/cudnn/MHA.cpp); its own engines may need more.
    """
    batch, heads, length, channels = query.shape
    workspace = Buffer(4 * batch * heads * length * (channels + 1))
    return Inside(after=(workspace, workspace))


def efficient_forward(query: Tensor, value: Tensor) -> Inside:
    """Return the output in float32, which memory-efficient attention sums up for wide heads in 16 bits.

    The source is _efficient_attention_forward in aten/src/ATen/native/transformers/cuda/attention.cu
    (kNeedsOutputAccumulatorBuffer; kernels for more than 128 channels do not hold a row of the output).
    """
    batch, heads, length, _ = query.shape
    if query.dtype == torch.float32 or value.shape[-1] <= WIDEST_ROW:
        return NOTHING
    output = Buffer(4 * batch * heads * length * value.shape[-1])
    return Inside(after=(output, output))


def efficient_backward(
    gradient: Tensor, query: Tensor, key: Tensor, dropout: float, capability: tuple[int, int]
) -> Inside:
    """Return the row sums of output x gradient, and the workspace, of memory-efficient attention.

    A gradient that is not contiguous by tokens is copied before. In float32 torch itself computes the sums. If heads
    share keys, the gradients of keys and values of every head come first. The source is _efficient_attention_backward
    in aten/src/ATen/native/transformers/cuda/attention_backward.cu.
    """
    batch, heads, length, channels = query.shape
    blocks, copy = _blocks_of(query, dropout, capability), _copy(gradient)
    form = (batch * heads, length, key.shape[2], channels, blocks.queries, blocks.keys, int(blocks.accumulates))
    sums = Buffer(4 * batch * heads * length)
    workspace = Buffer(efficient_workspace_bytes(*form), form, torch.float32)
    parts = _of_every_head(query, key)
    if query.dtype != torch.float32:
        return Inside(before=copy, after=(*parts, sums, workspace, sums, workspace, *parts, *copy))
    product, rows = Buffer(4 * query.numel()), Buffer(sums.num_bytes)
    after = (*parts, product, rows, sums, rows, product, workspace, sums, workspace, *parts, *copy)
    return Inside(before=copy, after=after)


def _copy(heads: Tensor) -> tuple[Buffer, ...]:
    """Return a copy of what is not contiguous by sequence, token, head and channel."""
    return () if heads.transpose(1, 2).is_contiguous() else (Buffer(heads.numel() * heads.element_size()),)


def _of_every_head(query: Tensor, key: Tensor) -> tuple[Buffer, ...]:
    """Return the gradients of keys and values for every head of the query, which are summed for those that share."""
    batch, heads, _, channels = query.shape
    if heads == key.shape[1]:
        return ()
    num_bytes = batch * heads * key.shape[2] * channels * key.element_size()
    return Buffer(num_bytes), Buffer(num_bytes)


def efficient_workspace_bytes(
    batch_heads: int, length: int, key_length: int, channels: int, queries: int, keys: int, accumulates: int
) -> int:
    """Return the bytes of the workspace, by the sizes in _Blocks (kernel_backward.h, workspace_strideBH)."""
    elements = -(-length // queries) * -(-channels // keys) * (queries * keys + 4)
    if accumulates:
        splits = max(1, min(-(-key_length // keys), 200 // batch_heads))
        if batch_heads >= 256 and key_length <= 2 * keys:
            splits = 1
        elements += 2 * splits * keys * round_up(channels, queries)
    return 4 * batch_heads * round_up(elements, 4)


class _Blocks(NamedTuple):
    """The sizes of the blocks of queries and keys that a kernel works on."""

    queries: int
    keys: int
    accumulates: bool
    """Whether the gradients of keys and values are summed in the workspace, in float32."""


def _blocks_of(query: Tensor, dropout: float, capability: tuple[int, int]) -> _Blocks:
    """Return the blocks of the first kernel that fits (mem_eff_attention/kernels/generate_kernels.py)."""
    channels = query.shape[-1]
    large_memory = capability in ((8, 0), (8, 7)) or capability[0] in (9, 10)
    if channels <= 64:
        return _Blocks(64, 64, False)
    if query.dtype == torch.float32:
        return _Blocks(128 if large_memory else 64, 64, False)
    if channels > WIDEST_ROW:
        return _Blocks(128, 64, True)
    if capability < (8, 0) or (capability in ((8, 6), (8, 9)) and channels <= 96 and not dropout):
        return _Blocks(128, 64, False)
    return _Blocks(128, 128, False) if large_memory else _Blocks(64, 64, True)
