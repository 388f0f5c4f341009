"""Workspaces: memory that operators allocate inside their kernels, in one table with the source of each row.

Not included, because no source says how large they are: the workspaces of cuDNN and (on a CPU) oneDNN, and the
temporaries of cub and thrust.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.base.units import MIB
from pipeline.memory.gradient_sums import in_backward

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
NO_REDUCTION = 0
"""torch's number for reduction="none" (torch.nn._reduction)."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an operator."""

    capability: tuple[int, int] | None
    """Compute capability of the device; None for a CPU."""
    args: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The workspace of some operators."""

    operators: tuple[Any, ...]
    num_bytes: Callable[[Call], int]
    only_cuda: bool
    kept: bool
    """Allocated once in each thread and kept, instead of freed when the operator ends."""
    source: str


def _cublas_workspace(call: Call) -> int:
    assert call.capability is not None  # the row is for CUDA
    return 32 * MIB if call.capability[0] in (9, 10, 11, 12) else 2 * 4 * MIB + 8 * 16 * 1024


def _flash_backward(call: Call) -> int:
    """Return the bytes of softmax_d, dq_accum, and, if heads share keys, of dk and dv for every query head."""
    query: Tensor = call.args[1]
    key: Tensor = call.args[2]
    batch, heads, length, channels = query.shape
    rounded_length, rounded_channels = _up(length, 128), _up(channels, 32 if channels <= 128 else 64)
    float32_bytes = 4 * batch * heads * rounded_length * (1 + rounded_channels)
    shared = heads != key.shape[1]
    return float32_bytes + (2 * batch * key.shape[2] * heads * channels * key.element_size() if shared else 0)


def _efficient_backward(call: Call) -> int:
    """Return the bytes of the row sums of output x gradient, and in float32 of the product itself."""
    query: Tensor = call.args[1]
    batch, heads, length, channels = query.shape
    rows = 4 * batch * heads * length
    return rows + (rows * channels if query.dtype == torch.float32 else 0)


def _squared_errors(call: Call) -> int:
    """Return the bytes of the errors of all elements, if the loss is reduced."""
    inputs: Tensor = call.args[0]
    reduced = len(call.args) < 3 or call.args[2] != NO_REDUCTION
    return inputs.numel() * inputs.element_size() if reduced else 0


ROWS = (
    Row(
        operators=(aten.mse_loss.default,),
        num_bytes=_squared_errors,
        only_cuda=False,
        kept=False,
        source="aten/src/ATen/native/BinaryOps.cpp and Loss.cpp, mse_loss_out; measured on a CPU",
    ),
    Row(
        operators=PRODUCTS,
        num_bytes=_cublas_workspace,
        only_cuda=True,
        kept=True,
        source="aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize; cublasLt shares it "
        "(TORCH_CUBLASLT_UNIFIED_WORKSPACE is on in torch's own builds, torch/backends/cuda/__init__.py)",
    ),
    Row(
        operators=(aten._scaled_dot_product_flash_attention_backward.default,),
        num_bytes=_flash_backward,
        only_cuda=True,
        kept=False,
        source="aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd",
    ),
    Row(
        operators=(aten._scaled_dot_product_efficient_attention_backward.default,),
        num_bytes=_efficient_backward,
        only_cuda=True,
        kept=False,
        source="aten/src/ATen/native/transformers/cuda/attention_backward.cu, _efficient_attention_backward, delta",
    ),
)


class WorkspaceTable:
    """Returns the workspaces of a simulated run's operators."""

    def __init__(self, capability: tuple[int, int] | None) -> None:
        self._capability = capability
        rows = [row for row in ROWS if capability or not row.only_cuda]
        self._rows = {operator: row for row in rows for operator in row.operators}
        self._kept: set[tuple[Row, bool]] = set()

    def __call__(self, operator: Any, args: tuple[Any, ...]) -> Iterator[tuple[int, bool]]:
        """Yield the bytes of each workspace of this call, and whether it is kept after the call."""
        row = self._rows.get(operator)
        if row is None:
            return
        backward = in_backward()  # it has a thread of its own on CUDA
        if not row.kept or (row, backward) not in self._kept:
            self._kept.add((row, backward))
            yield row.num_bytes(Call(capability=self._capability, args=args)), row.kept


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
