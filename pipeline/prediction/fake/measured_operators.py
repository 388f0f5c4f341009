"""What a library's operators allocate inside their kernels on a CPU, measured by one call on real tensors."""

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


def measured_buffers(operator: Any, args: tuple[Any, ...]) -> Inside:
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
