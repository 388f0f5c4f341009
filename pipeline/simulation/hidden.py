"""What CUDA operators allocate inside themselves, unseen by the dispatcher: one table, each row with its source.

Left out, because nothing that can be read says how much they are: cuDNN's workspaces, cub's and thrust's temporaries.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
MIB = 2**20
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
NO_GRAPH_TASK = -1


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an operator."""

    capability: tuple[int, int]
    """Compute capability of the device."""
    args: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that operators allocate inside themselves."""

    operators: tuple[Any, ...]
    num_bytes: Callable[[Call], int]
    kept: bool
    """Taken once in each thread and never given back, instead of for the time of the operator."""
    source: str


def _cublas_workspace(call: Call) -> int:
    return 32 * MIB if call.capability[0] in (9, 10, 11, 12) else 2 * 4 * MIB + 8 * 16 * 1024


def _flash_backward(call: Call) -> int:
    """Return softmax_d, dq_accum, and dk and dv of every query head where heads share keys."""
    query: Tensor = call.args[1]
    key: Tensor = call.args[2]
    batch, heads, length, channels = query.shape
    rounded_length, rounded_channels = _up(length, 128), _up(channels, 32 if channels <= 128 else 64)
    float32_bytes = 4 * batch * heads * rounded_length * (1 + rounded_channels)
    shared = heads != key.shape[1]
    return float32_bytes + (2 * batch * key.shape[2] * heads * channels * key.element_size() if shared else 0)


def _efficient_backward(call: Call) -> int:
    """Return the rows' sums of output x gradient, and in float32 the product itself, which torch computes first."""
    query: Tensor = call.args[1]
    batch, heads, length, channels = query.shape
    rows = 4 * batch * heads * length
    return rows + (rows * channels if query.dtype == torch.float32 else 0)


ROWS = (
    Row(
        operators=PRODUCTS,
        num_bytes=_cublas_workspace,
        kept=True,
        source="aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize; cublasLt shares it "
        "(TORCH_CUBLASLT_UNIFIED_WORKSPACE is on in torch's own builds, torch/backends/cuda/__init__.py)",
    ),
    Row(
        operators=(aten._scaled_dot_product_flash_attention_backward.default,),
        num_bytes=_flash_backward,
        kept=False,
        source="aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd",
    ),
    Row(
        operators=(aten._scaled_dot_product_efficient_attention_backward.default,),
        num_bytes=_efficient_backward,
        kept=False,
        source="aten/src/ATen/native/transformers/cuda/attention_backward.cu, _efficient_attention_backward, delta",
    ),
)


class CudaHidden:
    """Knows of a simulated run what its operators allocate inside themselves."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability
        self._kept: set[tuple[int, bool]] = set()

    def __call__(self, operator: Any, args: tuple[Any, ...]) -> Iterator[tuple[int, bool]]:
        """Yield bytes, and whether they are kept for ever, of what this call of `operator` allocates inside itself."""
        for number, row in enumerate(ROWS):
            if operator not in row.operators:
                continue
            in_backward = torch._C._current_graph_task_id() != NO_GRAPH_TASK  # which has a thread of its own on CUDA
            if row.kept and (number, in_backward) in self._kept:
                continue
            self._kept.add((number, in_backward))
            yield row.num_bytes(Call(capability=self._capability, args=args)), row.kept


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
