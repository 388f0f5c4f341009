"""What some operators allocate inside their kernels on a CPU besides their results: known, or measured by one call."""

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import psutil
import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import _disable_current_modes

from pipeline.base.processes import num_cores
from pipeline.base.units import MIB
from pipeline.memory.inside import NOTHING, Buffer, Inside

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
MEASURED = (
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.mkldnn_rnn_layer.default,
    aten.mkldnn_rnn_layer_backward.default,
)
"""Convolutions and LSTMs: oneDNN copies their tensors into layouts of its own, which only it knows."""
MOST_BYTES = min(1024 * MIB, psutil.virtual_memory().total // (8 * num_cores()))
"""Bytes of the arguments of the largest call that is measured: each core may measure one, with results and copies."""
QUIET = {"KINETO_LOG_LEVEL": "6"}
"""Keeps the profiler from writing its course to stderr."""

Form = tuple[Any, ...]
"""The arguments of a call: shape, strides and type in place of each tensor."""


def cpu_buffers(operator: Any, args: tuple[Any, ...]) -> Inside:
    """Return the buffers of one call of an operator."""
    if operator is aten.mse_loss.default:
        return _squared_errors(args)
    if operator in ATTENTION:
        return _blocks(operator, args)
    if operator in MEASURED or (operator in PRODUCTS and _is_small_product(args)):
        return _measured(operator, args)
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
    measured = _measured(operator, alone).before
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


def _measured(operator: Any, args: tuple[Any, ...]) -> Inside:
    """Return the buffers of one call of an operator, whose tensors need not have values."""
    num_bytes = sum(arg.numel() * arg.element_size() for arg in args if isinstance(arg, Tensor))
    if num_bytes > MOST_BYTES:
        return NOTHING
    return _inside(operator, tuple(map(_form, args)), torch.get_num_threads())


def _form(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    return tuple(argument) if isinstance(argument, list) else argument


def with_workspace(operator: Any, args: Sequence[Any], results: Any) -> Any:
    """Return an operator's results; an LSTM's with what oneDNN keeps for its backward pass, empty on fake tensors."""
    if operator is not aten.mkldnn_rnn_layer.default or not args[-1]:
        return results
    *others, workspace = results
    num_bytes = _num_workspace_bytes(tuple(map(_form, args)), torch.get_num_threads())
    return (*others, workspace.new_empty(num_bytes))


@lru_cache(maxsize=1024)
def _num_workspace_bytes(form: Form, num_threads: int) -> int:
    del num_threads
    with _disable_current_modes(), torch.enable_grad():
        workspace: Tensor = aten.mkldnn_rnn_layer.default(*map(_argument, form))[-1]
        return workspace.numel()


@lru_cache(maxsize=1024)
def _inside(operator: Any, form: Form, num_threads: int) -> Inside:
    """Return what the call with these arguments allocates and frees, its results too: these are freed at its end."""
    del num_threads  # oneDNN's scratchpads depend on it
    in_training = form[-1] is True  # an LSTM's last argument: it then keeps what its backward pass needs
    with patch.dict(os.environ, QUIET), _disable_current_modes(), torch.set_grad_enabled(in_training):
        args = [_argument(part) for part in form]
        try:
            with profile(profile_memory=True, use_kineto=True) as profiled:
                results = operator(*args)
        except RuntimeError:  # the host has no room
            return NOTHING
    del results
    assert profiled.kineto_results is not None
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    changes: list[Buffer] = []
    live: list[Buffer] = []
    for size in (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())):
        if size > 0:
            live.append(Buffer(size))
            changes.append(live[-1])
        elif freed := next((one for one in reversed(live) if one.num_bytes == -size), None):
            live.remove(freed)
            changes.append(freed)
    return NOTHING if len(changes) == len(live) else Inside(before=(*changes, *live))


def _argument(part: Any) -> Any:
    """Return a real tensor for the form of one, any other argument as it is."""
    if isinstance(part, tuple) and len(part) == 3 and isinstance(part[2], torch.dtype):
        shape, stride, dtype = part
        return torch.empty_strided(shape, stride, dtype=dtype).zero_()
    return part
