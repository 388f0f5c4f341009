"""Language models' heads: the loss of their logits, hidden states without logits, and which heads can be separated."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.base.contracts import Batch, Head, Trainable
from pipeline.base.errors import first_line
from pipeline.data._support.sequences import IGNORED_LABEL

PROBE_LENGTH = 2
"""Tokens of the sequence on which a head is checked."""
PROBED_LOGITS = (-100.0, 100.0)
"""Range of the logits on which it is checked: beyond every soft cap."""

Logits = Callable[[nn.Module, Batch], Tensor]
"""Calls a model, as in Head."""


def token_loss(logits: Logits, module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
    """Return the summed cross-entropy of float32 logits divided by the window's targets; no output of a model is kept.

    It equals transformers' ForCausalLMLoss with num_items_in_batch, which not all models of transformers support.
    """
    logits_BTV, targets = logits(module, batch).float(), shifted_targets(batch)
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets, ignore_index=IGNORED_LABEL, reduction="sum")
    return loss / num_targets


def shifted_targets(batch: Batch) -> Tensor:
    """Return the next token of each position, int64 [B x T]; the last position of a sequence has none."""
    return F.pad(batch["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:].flatten()


def head_of(module: nn.Module, logits: Logits) -> Head | None:
    """Return the head that `module` names as transformers' models do, by get_output_embeddings().

    It is not checked: see why_inseparable().
    """
    layer = getattr(module, "get_output_embeddings", lambda: None)()
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        return None
    if not layer.weight.is_floating_point():
        return None
    soft_cap = getattr(getattr(module, "config", None), "final_logit_softcapping", None)
    return Head(layer=layer, logits=logits, soft_cap=soft_cap)


def hidden_states(head: Head, module: nn.Module, batch: Batch) -> Tensor:
    """Return what the head multiplies, [B, T, C], from a forward pass of the whole model that computes no logits."""
    received: list[Tensor] = []

    def without_columns(hidden_BTC: Tensor) -> Tensor:
        received.append(hidden_BTC)
        return hidden_BTC[..., :0]  # whatever the model does with logits, it does with none

    _call_with_head(head, without_columns, module, batch)
    return received.pop()


def why_inseparable(name: str, trainable: Trainable, soft_cap: bool) -> str | None:
    """Return why the logits of a model are not those of its head, or None if they are; capped ones if `soft_cap`.

    On fake tensors up to its head, which is replaced by one that returns known logits: the model must return them too.
    """
    head = trainable.head
    if head is None:
        return (
            f"{name} names no torch.nn.Linear as its head; give it a method get_output_embeddings() that returns it, "
            "or return a Trainable with a head"
        )
    cap = head.soft_cap
    if cap is not None and not soft_cap:
        return f"{name} caps its logits at {cap:g}"
    given_BTV = torch.linspace(*PROBED_LOGITS, head.layer.out_features, device="cpu").expand(1, PROBE_LENGTH, -1)
    expected_BTV = given_BTV if cap is None else cap * torch.tanh(given_BTV / cap)
    try:
        returned_BTV = _logits_of(head, given_BTV, trainable.module)
        if returned_BTV.shape == expected_BTV.shape and torch.allclose(returned_BTV, expected_BTV):
            return None
    except Exception as error:  # the user's code may raise anything
        return (
            f"{name} cannot be called on {PROBE_LENGTH} tokens without values ({type(error).__name__}: "
            f"{first_line(error)}); let its forward method take them"
        )
    return f"{name} changes its logits after its head, in a way that is not known here"


def _logits_of(head: Head, given_BTV: Tensor, module: nn.Module) -> Tensor:
    """Return what a model makes of known logits; all before its head is computed on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ExitStack() as without_values, torch.no_grad():
        without_values.enter_context(FakeTensorMode(allow_non_fake_inputs=True))

        def known(_: Tensor) -> Tensor:
            without_values.close()
            return given_BTV

        ids_BT = torch.zeros(1, PROBE_LENGTH, dtype=torch.int64, device=head.layer.weight.device)
        return _call_with_head(head, known, module, {"input_ids": ids_BT})


def _call_with_head(head: Head, forward: Any, module: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of a forward pass in which the head computes `forward`."""
    with patch.object(head.layer, "forward", forward):
        return head.logits(module, batch)
