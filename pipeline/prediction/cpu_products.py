"""oneDNN's scratchpads of matrix products in bfloat16 on this CPU, each measured once.

oneDNN takes them from torch's allocator (aten/src/ATen/native/mkldnn/Matmul.cpp). No source gives their sizes: they
depend on the shapes and layouts, on the CPU's instructions and on the number of threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.utils._python_dispatch import _disable_current_modes

from pipeline.memory.inside import NOTHING, Buffer, Inside

aten = torch.ops.aten
PRODUCTS: dict[Any, tuple[tuple[int, ...], ...]] = {
    aten.mm.default: ((2, 2),),
    aten.addmm.default: ((1, 2, 2), (2, 2, 2)),
    aten.bmm.default: ((3, 3),),
}
"""Products, and the number of axes of each argument; the first one of addmm is a bias or a matrix."""
LARGEST_PRODUCT = 2e9
"""Multiplications above which a product is not measured, and counts as if it had no scratchpad.

A scratchpad has a few MiB at most, which is little beside such arguments, and measuring it would take too long.
"""


def scratchpad(operator: Any, args: tuple[Any, ...]) -> Inside:
    """Return the scratchpad of a product, in a buffer whose shape is the `form` that scratchpad_bytes() takes."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if any(tensor.dtype != torch.bfloat16 for tensor in tensors):
        return NOTHING
    if tuple(tensor.dim() for tensor in tensors) not in PRODUCTS[operator]:
        return NOTHING
    form = tuple(number for tensor in tensors for number in (*tensor.shape, *tensor.stride()))
    buffer = Buffer(scratchpad_bytes(_name(operator), form), form, torch.bfloat16)
    return Inside(after=(buffer, buffer))


def scratchpad_bytes(name: str, form: tuple[int, ...]) -> int:
    """Return the bytes of the scratchpad that the recorder calls `name`, with the current number of threads.

    `form` has the sizes and strides of each argument, one after the other. It is what a product of zeros takes besides
    its result.
    """
    return _measured_bytes(name, form, torch.get_num_threads())


@cache
def _measured_bytes(name: str, form: tuple[int, ...], num_threads: int) -> int:
    del num_threads  # it is the current one, and part of the cache's key
    [operator] = [each for each in PRODUCTS if name == _name(each)]
    with _disable_current_modes(), torch.no_grad():
        arguments, numbers = [], list(form)
        [ranks] = [ranks for ranks in PRODUCTS[operator] if 2 * sum(ranks) == len(form)]
        for rank in ranks:
            shape, strides, numbers = numbers[:rank], numbers[rank : 2 * rank], numbers[2 * rank :]
            arguments.append(torch.empty_strided(shape, strides, dtype=torch.bfloat16).zero_())
        if arguments[-2].numel() * arguments[-1].shape[-1] > LARGEST_PRODUCT:
            return 0
        with _allocations() as sizes:
            result = operator(*arguments)
    more_bytes: int = max(accumulate(sizes), default=0) - result.numel() * result.element_size()
    return max(0, more_bytes)


@contextmanager
def _allocations() -> Iterator[list[int]]:
    """Yield a list that has the bytes of each allocation, and of each release as a negative number, at the end.

    It takes 0.1 ms. torch.profiler takes seconds for its first profile, and prints lines that cannot be suppressed.
    """
    sizes: list[int] = []
    profiler: Any = torch.autograd
    options = (False, True, False, False, False)  # record_shapes, profile_memory, with_stack, with_flops, with_modules
    kind = profiler.ProfilerState.CPU
    profiler._enable_profiler_legacy(profiler.ProfilerConfig(kind, *options, _ExperimentalConfig()))
    try:
        yield sizes
    finally:
        events = [event for of_thread in profiler._disable_profiler_legacy() for event in of_thread]
        sizes += [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]


def is_scratchpad(name: str, dtype: torch.dtype) -> bool:
    """Whether a buffer of this name and type is a scratchpad."""
    return dtype == torch.bfloat16 and name in map(_name, PRODUCTS)


def _name(operator: Any) -> str:
    return f"inside {operator.__name__.partition('.')[0]}"
