"""The loss of connectionist temporal classification on fake tensors, whose shapes torch takes from values."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pipeline.prediction.patches import replaced


def ctc_loss() -> AbstractContextManager[Any]:
    """Replace torch's loss by one that allocates the same, for labels that all have one length."""
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
