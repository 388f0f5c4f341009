"""Collectives of torch.distributed as the dispatcher sees them: what each rank sends, and whether it can overlap.

With a ring, and with any algorithm that is bound by what a rank sends, gathering or scattering S bytes among N ranks
sends S x (N - 1) / N of each rank, and a sum that all ranks receive twice that.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LIBRARIES = ("c10d", "_c10d_functional")
WAITED_FOR = ", waited for"
"""End of the name of a collective that cannot overlap with the operators after it."""
KINDS = {
    "all_reduce": ("allreduce", "all_reduce"),
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
}
"""Kinds of collectives, and how the names of their operators begin."""


def find_collective(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[str, int] | None:
    """Return the collective that a call of an operator is, and the bytes that this rank sends; None if it is none.

    Its name has its kind and the number of ranks, and whether it is waited for.
    """
    kind = _kind(operator)
    if kind is None:
        return None
    values = {argument.name: value for argument, value in zip(operator._schema.arguments, args, strict=False)}
    values |= kwargs
    num_ranks = _num_ranks(values)
    whole_bytes = max(map(num_bytes, (*values.values(), result)))  # the others are a part of it
    times = 2 if kind == "all_reduce" else 1
    name = f"{kind} of {num_ranks}{'' if _can_overlap(values) else WAITED_FOR}"
    return name, times * whole_bytes * (num_ranks - 1) // num_ranks


@cache
def _kind(operator: Any) -> str | None:
    if operator.namespace not in LIBRARIES:
        return None
    name = operator.overloadpacket.__name__.lstrip("_")
    return next((kind for kind, names in KINDS.items() if name.startswith(names)), None)


def _num_ranks(values: Mapping[str, Any]) -> int:
    if (group := values.get("process_group")) is not None:
        return int(dist.ProcessGroup.unbox(group).size())
    return int(dist.distributed_c10d._resolve_process_group(values["group_name"]).size())  # type: ignore[attr-defined]


def _can_overlap(values: Mapping[str, Any]) -> bool:
    """Whether the stream that computes goes on meanwhile: its caller waits later, or it is on a stream of its own.

    DTensor waits for a functional one as soon as it needs the result, which here is at once.
    """
    if "process_group" not in values:
        return False
    is_apart = torch.cuda.is_available() and torch.cuda.current_stream() != torch.cuda.default_stream()
    return bool(values.get("async_op", True)) or is_apart


def num_bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of the tensors in a list or tuple; 0 for anything else."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(num_bytes(part) for part in value)
    return 0
