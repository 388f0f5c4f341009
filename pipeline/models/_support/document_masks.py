"""Models of transformers that keep the documents of a sequence apart where their positions begin anew."""

import inspect
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers in transformers' configurations whose masks transformers makes."""
PROBE_LENGTH = 4
"""Tokens of the sequence on which a model is checked."""


def why_documents_join(name: str, module: nn.Module) -> str | None:
    """Return why a model mixes documents, or None if transformers makes it a mask of each; it may be without weights.

    It must hand its `position_ids` to transformers' search for documents, and have no layer with a state that goes on
    from token to token.
    """
    from transformers import masking_utils

    kinds = set(getattr(getattr(module, "config", None), "layer_types", None) or ())
    if getattr(module, "_is_stateful", False) or kinds - {*ATTENDING}:
        return f"{name} has layers that are not attention, whose states go on from one document to the next"
    if "position_ids" not in inspect.signature(module.forward).parameters:
        return f"{name} does not take position_ids"
    device = next(module.parameters()).device
    positions = torch.zeros(1, PROBE_LENGTH, dtype=torch.int64, device=device)
    searched: list[Tensor] = []

    def search(position_ids: Tensor) -> None:
        searched.append(position_ids)

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(patch.object(masking_utils, "find_packed_sequence_indices", search))
        inputs: dict[str, Any] = {"input_ids": torch.zeros_like(positions), "position_ids": positions}
        try:
            module(**inputs, use_cache=False)
        except Exception:  # a model that reads values before its masks are made has not searched
            if not searched:
                return f"{name} cannot be called on tokens without values"
    if not any(found is positions for found in searched):
        return f"{name} makes its attention mask without position_ids"
    return None
