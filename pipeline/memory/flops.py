"""Floating-point operations of an operator call, by torch's own formulas: matrix products and attention."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _product(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return 2 * left.shape.numel() * right.shape[-1]


def _added_product(_: Tensor, left: Tensor, right: Tensor, *__: Any, **___: Any) -> int:
    return _product(left, right)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, *_of_every_head(query, key, value)))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = _of_every_head(query, key, value)
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, *shapes))  # type: ignore[no-untyped-call]


def _of_every_head(query: Tensor, *parts: Tensor) -> Iterator[torch.Size]:
    """Yield the shapes of keys and values for every head of the query: torch 2.11 refuses shared ones."""
    for part in parts:
        yield torch.Size((part.shape[0], query.shape[1], *part.shape[2:]))


FORMULAS = {
    **flop_registry,
    **dict.fromkeys((aten.mm, aten.bmm, aten._grouped_mm), _product),
    **dict.fromkeys((aten.addmm, aten.addmm_, aten.baddbmm), _added_product),
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""The formulas of torch.utils.flop_counter, and those that some versions lack: products added in place, attention on a
CPU, attention in which heads share keys, and grouped matrix products. Those of products, which are most calls, are
written out: torch's take 100 microseconds for the shapes."""
