"""The cross-entropy of a language model's head, whose logits exist for one chunk of tokens at a time.

Axes: N tokens, n tokens of a chunk, C channels, V vocabulary. Only torch is imported: exported scripts hold this code.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def chunked_cross_entropy(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    chunk_tokens: int,
    soft_cap: float | None = None,
    ignored: int = -100,
    factor: Tensor | float = 1.0,
) -> Tensor:
    """Return the cross-entropy of the logits hidden @ weight.T + bias, summed over the targets, in float32.

    The gradients are computed with the loss, chunk by chunk, so that no logits are stored or computed again. Products
    are of autocast's type where it is enabled; the loss and the gradients of weight and bias are summed in float32.
    In 16 bits they are rounded as those of `factor` times the loss: what the backward pass multiplies it by.
    Ignored targets are masked: how many there are would have to be read from the device.
    """
    parts = (hidden_NC, weight_VC, bias_V)
    wanted = [torch.is_grad_enabled() and part is not None and part.requires_grad for part in parts]
    device = hidden_NC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VC.dtype
    factor = 1.0 if dtype == torch.float32 else factor
    hidden, weight = hidden_NC.detach(), weight_VC.detach().to(dtype)
    bias = None if bias_V is None else bias_V.detach().to(dtype)
    hidden_sum = torch.empty_like(hidden) if wanted[0] else None
    weight_sum = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
    bias_sum = torch.zeros_like(weight[:, 0], dtype=torch.float32) if wanted[2] else None
    total = torch.zeros((), device=hidden.device)
    for start in range(0, len(hidden), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        inputs_nC, is_target_n = hidden[chunk].to(dtype), targets_N[chunk] != ignored
        loss, logits_nV = _loss_and_gradient(inputs_nC, weight, bias, targets_N[chunk], is_target_n, soft_cap, factor)
        total += loss
        counted_n1 = is_target_n.unsqueeze(1).to(dtype)
        if hidden_sum is not None:
            hidden_sum[chunk] = (logits_nV @ weight).mul_(counted_n1)
        if weight_sum is not None:
            _add_product(weight_sum, logits_nV.t(), inputs_nC * counted_n1)
        if bias_sum is not None:
            bias_sum += (counted_n1.t() @ logits_nV).squeeze(0)
        del logits_nV  # before those of the next chunk
    if not any(wanted):
        return total
    gradients = [hidden_sum, weight_sum, bias_sum]
    return _WithGradients.apply(total, factor, gradients, *parts)  # type: ignore[no-untyped-call, no-any-return]


def _loss_and_gradient(
    inputs_nC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    targets_n: Tensor,
    is_target_n: Tensor,
    soft_cap: float | None,
    factor: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Return a chunk's loss, and the gradient of `factor` times it for the products; rows without target are wrong."""
    logits_nV = F.linear(inputs_nC, weight_VC, bias_V).float()
    if soft_cap is not None:
        tanh_nV = logits_nV.div_(soft_cap).tanh_()
        logits_nV = tanh_nV * soft_cap
    index_n1 = torch.where(is_target_n, targets_n, 0).unsqueeze(1)
    largest_n1, position_n1 = logits_nV.max(dim=1, keepdim=True)
    of_target_n1 = logits_nV.gather(1, index_n1)
    torch.softmax(logits_nV, dim=1, out=logits_nV)
    log_sum_n1 = largest_n1 - logits_nV.gather(1, position_n1).log()  # as that of the largest is exp(largest - log_sum)
    loss = torch.where(is_target_n, (log_sum_n1 - of_target_n1).squeeze(1), 0.0).sum()
    logits_nV.scatter_add_(1, index_n1, torch.full_like(of_target_n1, -1.0))
    if soft_cap is not None:
        logits_nV.mul_(tanh_nV.square_().neg_().add_(1.0))
    if inputs_nC.dtype != torch.float32:
        logits_nV.mul_(factor)
    return loss, logits_nV.to(inputs_nC.dtype)


def _add_product(total_VC: Tensor, left_Vn: Tensor, right_nC: Tensor) -> None:
    """Add a matrix product to a float32 sum in place."""
    if left_Vn.dtype == total_VC.dtype:
        total_VC.addmm_(left_Vn, right_nC)
    else:
        total_VC += left_Vn @ right_nC


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are known but for a factor, by which they are multiplied in place."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, factor: Tensor | float, gradients: list[Tensor | None], *_: Tensor | None
    ) -> Tensor:
        ctx.factor, ctx.gradients = factor, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        missing, gradients = factor / ctx.factor, ctx.gradients
        del ctx.gradients  # autograd takes over a gradient that nothing else refers to
        return None, None, None, *(None if each is None else each.mul_(missing) for each in gradients)
