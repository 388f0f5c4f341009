"""What some operators allocate inside their kernels on a CPU besides their results."""

from typing import Any

import torch
from torch import Tensor

from pipeline.memory.inside import NOTHING, Buffer, Inside
from pipeline.prediction.fake.measured_operators import MEASURED, measured_buffers

aten = torch.ops.aten
NO_REDUCTION = 0
"""torch's number for reduction="none" (torch.nn._reduction)."""
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: 2,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 3,
}
"""Attention in one kernel, with the number of its results."""
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
"""Matrix products, for which oneDNN copies blocks of 16-bit factors."""
IS_SUPPORTED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
"""The operator that says whether oneDNN computes products of a type on this machine."""
LARGEST_PRODUCT = 2**29
"""Multiplications of the largest product that is measured: of a larger one the copies are no more than 3 MiB."""
LONGEST = 1024
"""Queries and keys of attention from which on its buffers, which are of blocks of them, do not grow."""


def cpu_buffers(operator: Any, args: tuple[Any, ...]) -> Inside:
    """Return the buffers of one call of an operator."""
    if operator is aten.mse_loss.default:
        return _squared_errors(args)
    if operator in ATTENTION:
        return _blocks(operator, args)
    if operator in MEASURED or (operator in PRODUCTS and _is_small_product(args)):
        return measured_buffers(operator, args)
    return _converted(args) if operator is aten.add_.Tensor else NOTHING


def _is_small_product(args: tuple[Any, ...]) -> bool:
    """Return whether oneDNN computes a product, and its copies may count beside what the training holds.

    The source is use_mkldnn_bf16_matmul and use_mkldnn_fp16_matmul in aten/src/ATen/native/mkldnn/Matmul.cpp.
    """
    first, second = [arg for arg in args if isinstance(arg, Tensor)][-2:]
    if first.dtype not in IS_SUPPORTED or first.numel() * second.shape[-1] > LARGEST_PRODUCT:
        return False
    return bool(getattr(torch.ops.mkldnn, IS_SUPPORTED[first.dtype])())


def _squared_errors(args: tuple[Any, ...]) -> Inside:
    """Return the errors of all elements, if the loss is reduced; the loss itself keeps a storage of that size.

    The source is mse_loss_out in aten/src/ATen/native/BinaryOps.cpp, and mse_loss in Loss.cpp, which makes the loss in
    the shape of the errors and then resizes it.
    """
    inputs: Tensor = args[0]
    if len(args) > 2 and args[2] == NO_REDUCTION:
        return NOTHING
    errors = Buffer(inputs.numel() * inputs.element_size())
    return Inside(after=(errors, errors), result_bytes=errors.num_bytes)


def _blocks(operator: Any, args: tuple[Any, ...]) -> Inside:
    """Return the blocks of scores of each thread, which one head of one sequence shows, and a copy of the gradient."""
    alone = tuple(_of_one_head(arg) if isinstance(arg, Tensor) and arg.dim() > 2 else arg for arg in args)
    measured = measured_buffers(operator, alone).before
    results = measured[: ATTENTION[operator]]
    blocks = tuple(buffer for buffer in measured if buffer not in results)
    first: Tensor = args[0]
    is_copied = len(results) == 3 and not first.transpose(1, 2).is_contiguous()
    copies = (Buffer(first.numel() * first.element_size()),) if is_copied else ()
    return Inside(after=(*copies, *blocks, *copies))


def _of_one_head(argument: Tensor) -> Tensor:
    return torch.empty(1, 1, *(min(size, LONGEST) for size in argument.shape[2:]), dtype=argument.dtype, device="meta")


def _converted(args: tuple[Any, ...]) -> Inside:
    """Return the copy of a summand in the type of the sum.

    The source is compute_types in aten/src/ATen/TensorIterator.cpp: temporaries of the common type on a CPU.
    """
    total, summand = args[:2]
    if not isinstance(summand, Tensor) or summand.dtype == total.dtype:
        return NOTHING
    copy = Buffer(summand.numel() * total.element_size())
    return Inside(before=(copy,), after=(copy,))
