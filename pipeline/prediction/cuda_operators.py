"""CUDA's behaviour on CPU tensors, in a context: autocast, attention and dropout allocate what they would on a GPU."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from pipeline.prediction.attention import attention_of
from pipeline.prediction.autocast import cuda_autocast
from pipeline.prediction.sums_in_place import adding_in_place


@contextmanager
def cuda_operators(capability: tuple[int, int]) -> Iterator[None]:
    """Register CUDA's rules for the operators that differ, and restore the CPU's on exit."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the kernels that are overridden
            for name, key, kernel in (
                *cuda_autocast(),
                ("scaled_dot_product_attention", "AutogradCPU", attention_of(capability)),
                ("dropout", "AutogradCPU", _dropout),
                ("linear", "AutogradCPU", _linear),
                ("softmax.int", "AutogradCPU", _normalized(torch.ops.aten._softmax)),
                ("log_softmax.int", "AutogradCPU", _normalized(torch.ops.aten._log_softmax)),
            ):
                library.impl(name, kernel, key, allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _dropout(inputs: Tensor, p: float, train: bool) -> Tensor:
    """Apply dropout as CUDA's fused kernel does, which saves a mask of one byte an element (aten's Dropout.cpp)."""
    if not train or p == 0 or inputs.numel() == 0:
        return inputs
    return torch.native_dropout(inputs, p, train)[0]


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product, to which a bias that is not part of it is added in place."""
    with adding_in_place():
        return torch.ops.aten.linear.default.decompose(inputs, weight, bias)  # type: ignore[no-any-return]


def _normalized(operator: Any) -> Callable[..., Tensor]:
    """Return a softmax that reads float16 and computes in float32 without a copy (aten's SoftMax.cpp)."""

    def normalize(inputs: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if inputs.dtype == torch.float16 and dtype == torch.float32:
            return operator(inputs, dim, True)  # type: ignore[no-any-return]
        return operator(inputs if dtype is None else inputs.to(dtype), dim, False)  # type: ignore[no-any-return]

    return normalize
