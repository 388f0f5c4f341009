"""What makes tensors of the CPU live and die as a GPU's: CUDA's own operators in place of the CPU's, for a while."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import Library

from pipeline.prediction.attention import attention_of
from pipeline.prediction.autocast import cuda_autocast


@contextmanager
def cuda_operators(capability: tuple[int, int]) -> Iterator[None]:
    """Replace operators by CUDA's, and restore them whatever happens."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of kernels that were there before
            for name, key, kernel in (
                *cuda_autocast(),
                ("scaled_dot_product_attention", "AutogradCPU", attention_of(capability)),
                ("dropout", "AutogradCPU", _dropout),
            ):
                library.impl(name, kernel, key, allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _dropout(inputs: Tensor, p: float, train: bool) -> Tensor:
    """Return what CUDA's fused kernel does, which keeps a mask of one byte an element (aten's Dropout.cpp)."""
    if not train or p == 0 or inputs.numel() == 0:
        return inputs
    return torch.native_dropout(inputs, p, train)[0]
