"""What some operators allocate inside their kernels on a CPU besides their results."""

from typing import Any

import torch
from torch import Tensor

from pipeline.memory.inside import NOTHING, Buffer, Inside
from pipeline.prediction.fake.measured_operators import MEASURED, measured_buffers

aten = torch.ops.aten
NO_REDUCTION = 0
"""torch's number for reduction="none" (torch.nn._reduction)."""


def cpu_buffers(operator: Any, args: tuple[Any, ...]) -> Inside:
    """Return the buffers of one call of an operator."""
    if operator is aten.mse_loss.default:
        return _squared_errors(args)
    if operator in MEASURED:
        return measured_buffers(operator, args)
    return _converted(args) if operator is aten.add_.Tensor else NOTHING


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


def _converted(args: tuple[Any, ...]) -> Inside:
    """Return the copy of a summand in the type of the sum.

    The source is compute_types in aten/src/ATen/TensorIterator.cpp: temporaries of the common type on a CPU.
    """
    total, summand = args[:2]
    if not isinstance(summand, Tensor) or summand.dtype == total.dtype:
        return NOTHING
    copy = Buffer(summand.numel() * total.element_size())
    return Inside(before=(copy,), after=(copy,))
