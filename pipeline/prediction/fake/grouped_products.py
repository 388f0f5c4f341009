"""Grouped matrix products, as of a mixture of experts, on fake tensors of any floating-point type.

torch computes them in float32 too, but its shape function accepts bfloat16 alone (torch/_meta_registrations.py,
meta_grouped_mm).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import Library

ALIGNMENT_BYTES = 16
"""Rows of the result begin at multiples of it (aten's GroupedMMUtils.h, create_grouped_gemm_output_tensor)."""


@contextmanager
def grouped_products() -> Iterator[None]:
    """Replace the shape function of aten's _grouped_mm, and restore it on exit."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the kernel that is overridden
            library.impl("_grouped_mm", _result, "Meta", allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _result(
    left: Tensor,
    right: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return an empty tensor of the product's form: one group for each offset if both operands are matrices."""
    del bias
    rows, columns = left.shape[-2], right.shape[-1]
    shape: tuple[int, ...] = (rows, columns)
    if left.dim() == right.dim():
        shape = (left.shape[0] if offsets is None else offsets.shape[0], rows, columns)
    dtype = out_dtype or left.dtype
    multiple = ALIGNMENT_BYTES // dtype.itemsize
    stride = -(-columns // multiple) * multiple
    return torch.empty_strided(shape, (rows * stride, stride, 1)[-len(shape) :], dtype=dtype, device=left.device)
