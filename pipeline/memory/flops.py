"""Floating-point operations of an operator call, by torch's own formulas: matrix products and attention."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

FORMULAS = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape)  # type: ignore[no-untyped-call]
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda out, q, k, v, *_, **__: sdpa_backward_flop_count(out.shape, q.shape, k.shape, v.shape)  # type: ignore[no-untyped-call]
    ),
    torch.ops.aten._grouped_mm: lambda a, b, *_, **__: 2 * a.shape.numel() * b.shape[-1],
}
"""The formulas of torch.utils.flop_counter, and those it lacks: attention on a CPU, and grouped matrix products."""


_counted: dict[tuple[Any, ...], int] = {}
"""Cached results by operator and shapes: on fake tensors the formula takes longer than the operator."""


def operations_of(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the floating-point operations of one call; 0 for an operator without a formula."""
    formula = FORMULAS.get(operator.overloadpacket)
    if formula is None:
        return 0
    call = (operator, *map(_form, args), *((name, _form(value)) for name, value in kwargs.items()))
    if call not in _counted:
        _counted[call] = int(formula(*args, **kwargs, out_val=result))
    return _counted[call]


def _form(value: Any) -> object:
    return value.shape if isinstance(value, Tensor) else repr(value)
