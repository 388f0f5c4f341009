"""Operators of torch that are written in Python, of other operators: those are what allocates and computes."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch


def _in_python() -> Mapping[Any, Callable[[tuple[Any, ...]], Any]]:
    """Return the functions that compute these operators from their arguments; not all versions of torch have them."""
    try:
        accumulate = import_module(
            "torch.nn.modules.linear_cross_entropy"
        )._linear_cross_entropy_batch_chunked_accumulator
    except (ImportError, AttributeError):
        return {}

    def chunked(args: tuple[Any, ...]) -> Any:
        *inputs, _, hidden_gradient, weight_gradient, bias_gradient = args  # without allow_retain_graph
        return accumulate(*inputs, hidden_gradient, weight_gradient, bias_gradient)

    return {torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default: chunked}


IN_PYTHON = _in_python()
"""Functions of an operator's arguments, by operator."""
