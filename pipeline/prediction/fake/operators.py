"""Operators of torch on fake tensors whose own shape functions read values, or refuse types."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from pipeline.prediction.patches import replaced

ALIGNMENT_BYTES = 16
"""Rows of the result begin at multiples of it (aten's GroupedMMUtils.h, create_grouped_gemm_output_tensor)."""


@contextmanager
def grouped_products() -> Iterator[None]:
    """Replace the shape function of aten's _grouped_mm, and restore it on exit.

    torch computes grouped products, as of a mixture of experts, in float32 too, but its own accepts bfloat16 alone
    (torch/_meta_registrations.py, meta_grouped_mm).
    """
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the kernel that is overridden
            library.impl("_grouped_mm", _grouped_product, "Meta", allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _grouped_product(
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


def ctc_loss() -> AbstractContextManager[Any]:
    """Replace torch's loss, which reads lengths, by one that allocates the same, for labels that all have one."""
    return replaced(torch, "ctc_loss", _ctc_loss)


def _ctc_loss(log_probs_TBV: Tensor, labels_BS: Tensor, *_: Any) -> Tensor:
    loss: Tensor = _Allocations.apply(log_probs_TBV, labels_BS).sum()  # type: ignore[no-untyped-call]
    return loss


class _Allocations(torch.autograd.Function):
    """What aten's _ctc_loss keeps and allocates on a CPU: sums over states, with blanks between labels."""

    @staticmethod
    def forward(ctx: Any, log_probs_TBV: Tensor, labels_BS: Tensor) -> Tensor:
        num_frames, num_examples, _ = log_probs_TBV.shape
        losses_B = log_probs_TBV.new_empty(num_examples)
        alphas = log_probs_TBV.new_empty(num_examples, num_frames, 2 * labels_BS.shape[1] + 1)
        ctx.save_for_backward(log_probs_TBV, labels_BS, losses_B, alphas)
        return losses_B

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, None]:
        log_probs_TBV, _, _, alphas = ctx.saved_tensors
        betas = torch.empty_like(alphas)
        gradient = torch.full_like(log_probs_TBV, 0.0)
        del betas
        return gradient, None
