"""The cross-entropy of a language model's head, whose logits exist for one chunk of tokens at a time.

Axes: N tokens, n tokens of a chunk, C channels, V vocabulary. Exported scripts hold these functions.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.base.technique import source_of


def chunked_cross_entropy(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    chunk_tokens: int,
    soft_cap: float | None = None,
    factor: Tensor | float = 1.0,
) -> Tensor:
    """Return the cross-entropy of the logits hidden @ weight.T + bias, summed over the targets, in float32.

    The gradients are computed with the loss, chunk by chunk, so that no logits are stored or computed again. Products
    are of autocast's type where it is enabled; the loss and the gradients of weight and bias are summed in float32.
    In 16 bits they are rounded as those of `factor` times the loss: what the backward pass multiplies it by.
    Targets of -100, which all kernels ignore, are masked: how many there are would have to be read from the device.
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
        inputs_nC, is_target_n = hidden[chunk].to(dtype), targets_N[chunk] != -100
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


def fused_cross_entropy(
    hidden_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, chunk_tokens: int, *_: object
) -> Tensor:
    """Return the cross-entropy summed over the targets by torch, which knows no soft cap."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens)
    return F.linear_cross_entropy(hidden_NC, weight_VC, targets_N, linear_bias=bias_V, reduction="sum", options=options)


def liger_cross_entropy(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    _chunk_tokens: int,
    soft_cap: float | None,
    *_: object,
) -> Tensor:
    """Return the cross-entropy summed over the targets by Liger's kernel, which chooses its own chunks."""
    of_liger = import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    options = {"reduction": "sum", "softcap": soft_cap, "accum_dtype": torch.float32}
    loss: Tensor = of_liger(hidden_NC, weight_VC, targets_N, bias=bias_V, **options)
    return loss


KERNELS: dict[str, Callable[..., Tensor]] = {
    "chunked": chunked_cross_entropy,
    "fused": fused_cross_entropy,
    "liger": liger_cross_entropy,
}
"""The summed loss of each value of the setting, with the parameters of chunked_cross_entropy()."""
FUNCTIONS = """from functools import wraps

import torch.nn.functional as F
from transformers.modeling_outputs import CausalLMOutput


{kernels}


def summed_loss_without_logits(model, ids_BT, labels_BT, factor=1.0, forward=None, **more):
    \"\"\"Return the cross-entropy summed over the targets; the head of the model only hands its input over.

    `factor` is what the backward pass multiplies it by: 16 bits hold the gradients of that.
    \"\"\"
    head, received = model.get_output_embeddings(), []
    before = vars(head).get("forward")
    head.forward = lambda hidden_BTC: received.append(hidden_BTC) or hidden_BTC[..., :0]
    try:
        (forward or model)(**{{**more, "input_ids": ids_BT, "use_cache": False}})
    finally:
        del head.forward
        if before is not None:
            head.forward = before
    hidden_NC, soft_cap = received.pop().flatten(0, 1), getattr(model.config, "final_logit_softcapping", None)
    targets_N = F.pad(labels_BT, (0, 1), value=-100)[:, 1:].flatten()
    chunk_tokens = {chunk}
    return {kernel}(hidden_NC, head.weight, head.bias, targets_N, chunk_tokens, soft_cap, factor)


def compute_loss_without_logits(model):
    \"\"\"Let the model return this loss, over the number of targets, where it is called with labels.\"\"\"
    plain = model.forward

    @wraps(plain)
    def forward(input_ids=None, *, labels=None, num_items_in_batch=None, **more):
        if labels is None:
            return plain(input_ids=input_ids, **more)
        count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(loss=summed_loss_without_logits(model, input_ids, labels, forward=plain, **more) / count)

    model.forward = forward
"""


def exported_loss(name: str, chunk: str) -> str:
    """Return the imports and functions of the loss by a kernel, which need nothing of this package.

    `chunk` is an expression of the tokens of a chunk, in which `head` is the head.
    """
    kernel = KERNELS[name]
    parts = (_loss_and_gradient, _add_product, _WithGradients) if name == "chunked" else ()
    return FUNCTIONS.format(kernels=source_of(kernel, *parts), kernel=kernel.__name__, chunk=chunk)
