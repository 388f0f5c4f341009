"""What operators allocate inside their kernels, in one table with the source of each row; products have their own file.

Not included: workspaces inside cuDNN's engines, whose size no source gives, the temporaries of cub and thrust, and
buffers of a few KiB.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from pipeline.base.contracts import Hardware
from pipeline.base.torch_version import TORCH_VERSION
from pipeline.memory.inside import NOTHING, Buffer, Inside
from pipeline.prediction.attention_buffers import (
    cudnn_backward,
    efficient_backward,
    efficient_forward,
    flash_backward,
    flash_forward,
)
from pipeline.prediction.cpu_products import PRODUCTS as CPU_PRODUCTS
from pipeline.prediction.cpu_products import scratchpad
from pipeline.prediction.product_workspaces import PRODUCTS, ProductWorkspaces
from pipeline.prediction.reductions import column_sum_bytes, embedding_buffer_bytes
from pipeline.prediction.sums_in_place import adds_in_place

aten = torch.ops.aten
FOREACH_CHUNK = 65536
"""Elements that a block of threads works on in an operator on lists (MultiTensorApply.cuh, kChunkSize)."""
NO_REDUCTION = 0
"""torch's number for reduction="none" (torch.nn._reduction)."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an operator."""

    hardware: Hardware
    args: tuple[Any, ...]

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the device, which is CUDA."""
        assert self.hardware.capability is not None
        return self.hardware.capability

    @property
    def num_multiprocessors(self) -> int:
        """Number of multiprocessors of the device, which is CUDA."""
        assert self.hardware.num_multiprocessors is not None
        return self.hardware.num_multiprocessors


@dataclass(frozen=True, kw_only=True)
class Row:
    """What some operators allocate."""

    operators: tuple[Any, ...]
    inside: Callable[[Call], Inside]
    only_cuda: bool = True
    source: str


def _column_sums(call: Call) -> Inside:
    """Return the buffers of the sum of a dense tensor over the axes that are outermost in memory."""
    tensor: Tensor = call.args[0]
    if tensor.dim() == 0 or tensor.numel() == 0:
        return NOTHING
    summed = {axis % tensor.dim() for axis in (call.args[1] or ())} if len(call.args) > 1 else set()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis not in summed))
    outer = order[: len(summed)]
    if set(outer) != summed or not 0 < len(outer) < tensor.dim() or not tensor.permute(order).is_contiguous():
        return NOTHING
    rows = prod(tensor.shape[axis] for axis in outer)
    columns = prod(tensor.shape[axis] for axis in order[len(outer) :])
    partial_sums, semaphores = column_sum_bytes(rows, columns, call.hardware)
    sums = Buffer(partial_sums, (rows, columns), torch.float32)
    locks = Buffer(semaphores, (rows, columns), torch.int32)
    return Inside(after=(sums, locks, locks, sums))


def _column_norms(call: Call) -> Inside:
    """Return the buffers of the norms over the outermost axes, which are reduced as sums are."""
    return _column_sums(Call(hardware=call.hardware, args=(call.args[0], *call.args[2:3])))


def _flash_forward(call: Call) -> Inside:
    """Return the partial results of the parts of the keys; a dropout of 0, which is the default, is not passed."""
    dropout = call.args[3] if len(call.args) > 3 else 0.0
    return flash_forward(call.args[0], call.args[1], dropout, call.num_multiprocessors)


def _embedding_backward(call: Call) -> Inside:
    """Return the gradients of parts of the sorted tokens."""
    gradient, indices, vocabulary_size = call.args[:3]
    shape = (indices.numel(), vocabulary_size, gradient.shape[-1])
    parts = Buffer(embedding_buffer_bytes(*shape), shape, torch.float32)
    return Inside(after=(parts, parts))


def _norms(call: Call) -> Inside:
    """Return the norms of all chunks: as many for each tensor as the largest has."""
    tensors: list[Tensor] = call.args[0]
    chunks = max(-(-tensor.numel() // FOREACH_CHUNK) for tensor in tensors)
    norms = Buffer(4 * len(tensors) * chunks)
    return Inside(before=(norms,), after=(norms,))


def _softmax_backward(call: Call) -> Inside:
    """Return the product of gradient and output."""
    gradient: Tensor = call.args[0]
    product = Buffer(gradient.numel() * gradient.element_size())
    return Inside(after=(product, product))


def _safe_softmax(call: Call) -> Inside:
    """Return which scores are -inf, and in which rows all are."""
    scores: Tensor = call.args[0]
    masked, rows = Buffer(scores.numel()), Buffer(scores.numel() // scores.shape[-1])
    return Inside(after=(masked, rows, rows, masked))


def _layer_norm_backward(call: Call) -> Inside:
    """Return a contiguous copy of the gradient."""
    gradient: Tensor = call.args[0]
    if gradient.is_contiguous():
        return NOTHING
    copy = Buffer(gradient.numel() * gradient.element_size())
    return Inside(after=(copy, copy))


def _squared_errors(call: Call) -> Inside:
    """Return the errors of all elements, if the loss is reduced; the loss itself keeps a storage of that size."""
    inputs: Tensor = call.args[0]
    if len(call.args) > 2 and call.args[2] == NO_REDUCTION:
        return NOTHING
    errors = Buffer(inputs.numel() * inputs.element_size())
    return Inside(after=(errors, errors), result_bytes=errors.num_bytes)


def _converted(call: Call) -> Inside:
    """Return the copy of a summand in the type of the sum, which only a CPU makes."""
    total, summand = call.args[:2]
    if call.hardware.capability is not None or not isinstance(summand, Tensor) or summand.dtype == total.dtype:
        return NOTHING
    copy = Buffer(summand.numel() * total.element_size())
    return Inside(before=(copy,), after=(copy,))


ROWS = (
    Row(
        operators=(aten.mse_loss.default,),
        inside=_squared_errors,
        only_cuda=False,
        source="aten/src/ATen/native/BinaryOps.cpp and Loss.cpp, mse_loss_out, and mse_loss, which makes the loss in "
        "the shape of the errors and then resizes it; measured on a CPU",
    ),
    Row(
        operators=(aten._scaled_dot_product_flash_attention.default,),
        inside=_flash_forward,
        source="aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, set_params_splitkv",
    ),
    Row(
        operators=(aten._scaled_dot_product_flash_attention_backward.default,),
        inside=lambda call: flash_backward(call.args[0], call.args[1], call.args[2], call.args[4]),
        source="aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd",
    ),
    Row(
        operators=(aten._scaled_dot_product_efficient_attention.default,),
        inside=lambda call: efficient_forward(call.args[0], call.args[2]),
        source="aten/src/ATen/native/transformers/cuda/attention.cu, _efficient_attention_forward",
    ),
    Row(
        operators=(aten._scaled_dot_product_efficient_attention_backward.default,),
        inside=lambda call: efficient_backward(call.args[0], call.args[1], call.args[2], call.args[9], call.capability),
        source="aten/src/ATen/native/transformers/cuda/attention_backward.cu, _efficient_attention_backward",
    ),
    Row(
        operators=(aten._scaled_dot_product_cudnn_attention_backward.default,),
        inside=lambda call: cudnn_backward(call.args[1]),
        source="aten/src/ATen/native/cudnn/MHA.cpp, run_cudnn_SDP_bprop",
    ),
    Row(
        operators=(aten.sum.dim_IntList,),
        inside=_column_sums,
        source="aten/src/ATen/native/cuda/Reduce.cuh, gpu_reduce_kernel",
    ),
    Row(
        operators=(aten.linalg_vector_norm.default,),
        inside=_column_norms,
        source="aten/src/ATen/native/cuda/ReduceNormKernel.cu, norm_kernel_cuda_impl, which calls gpu_reduce_kernel",
    ),
    Row(
        operators=(aten.embedding_dense_backward.default,),
        inside=_embedding_backward,
        source="aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel",
    ),
    Row(
        operators=(aten._foreach_norm.Scalar,),
        inside=_norms,
        source="aten/src/ATen/native/cuda/ForeachReduceOp.cu, foreach_tensor_norm_cuda",
    ),
    Row(
        operators=(aten.native_layer_norm_backward.default,),
        inside=_layer_norm_backward,
        source="aten/src/ATen/native/cuda/layer_norm_kernel.cu, LayerNormBackwardKernelImpl",
    ),
    Row(
        operators=(aten._softmax_backward_data.default,),
        inside=_softmax_backward,
        source="aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out",
    ),
    Row(
        operators=(aten._safe_softmax.default,),
        inside=_safe_softmax,
        source="aten/src/ATen/native/transformers/attention.cpp, _safe_softmax",
    ),
    Row(
        operators=(aten.add.Tensor,),
        inside=lambda call: Inside(in_place=adds_in_place()),
        source="pipeline/prediction/sums_in_place.py",
    ),
    Row(
        operators=(aten.add_.Tensor,),
        inside=_converted,
        only_cuda=False,
        source="aten/src/ATen/TensorIterator.cpp, compute_types: temporaries of the common type on a CPU",
    ),
    Row(
        operators=(aten.native_dropout.default,),
        inside=lambda call: Inside(results_reversed=True),
        source="aten/src/ATen/native/cuda/Dropout.cu, dropout_cuda: the mask comes before the output",
    ),
)


CPU_ROWS = tuple(
    Row(
        operators=(operator,),
        inside=lambda call, operator=operator: scratchpad(operator, call.args),  # type: ignore[misc]
        only_cuda=False,
        source="pipeline/prediction/cpu_products.py",
    )
    for operator in CPU_PRODUCTS
)
"""What matrix products allocate on a CPU."""


class WorkspaceTable:
    """Returns what the operators of a simulated run allocate inside their kernels."""

    def __init__(self, hardware: Hardware, version: tuple[int, ...] = TORCH_VERSION) -> None:
        self._hardware = hardware
        self._products = ProductWorkspaces(hardware.capability, version) if hardware.capability else None
        rows = ROWS if hardware.capability else [*(row for row in ROWS if not row.only_cuda), *CPU_ROWS]
        self._rows = {operator: row for row in rows for operator in row.operators}

    def __call__(self, operator: Any, args: tuple[Any, ...]) -> Inside:
        """Return the buffers of this call."""
        if self._products is not None and operator in PRODUCTS:
            return self._products(operator, args)
        row = self._rows.get(operator)
        return NOTHING if row is None else row.inside(Call(hardware=self._hardware, args=args))
