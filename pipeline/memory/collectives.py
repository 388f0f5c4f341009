"""Collectives of torch.distributed as the dispatcher sees them: what each rank sends, and whether it can overlap.

With a ring, and with any algorithm that is bound by what a rank sends, gathering or scattering S bytes among N ranks
sends S x (N - 1) / N of each rank, and a sum that all ranks receive twice that.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LIBRARIES = ("c10d", "_c10d_functional")
WAITED_FOR = ", waited for"
"""End of the name of a collective that cannot overlap with the operators after it."""
GROUP = re.compile(r" of (\d+)(?: in steps of (\d+))?(?: among (\d+))?")
"""What the name of a collective says of its ranks."""
KINDS = {
    "all_reduce": ("allreduce", "all_reduce"),
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
    "send": ("send",),
}
"""Kinds of collectives, with what one rank sends another, and how the names of their operators begin."""


def find_collective(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[str, int] | None:
    """Return the collective that a call of an operator is, and the bytes that this rank sends; None if it is none.

    Its name has its kind, the number of ranks, their distance where they are not neighbours, the number of all ranks
    where these are not all, and whether it is waited for: `all_reduce of 2 in steps of 8 among 16, waited for`.
    """
    kind = _kind(operator)
    if kind is None:
        return None
    values = {argument.name: value for argument, value in zip(operator._schema.arguments, args, strict=False)}
    values |= kwargs
    ranks = _ranks(values)
    if kind == "send":
        ranks = [dist.get_rank(), ranks[values["dst"]]]
    num_ranks = len(ranks)
    whole_bytes = max(map(num_bytes, (*values.values(), result)))  # the others are a part of it
    times = 2 if kind in ("all_reduce", "send") else 1  # of two ranks one sends all that it has to the other
    step = (max(ranks) - min(ranks)) // max(1, num_ranks - 1)
    steps = f" in steps of {step}" if step > 1 else ""
    among = f" among {dist.get_world_size()}" if num_ranks < dist.get_world_size() else ""
    name = f"{kind} of {num_ranks}{steps}{among}{'' if _can_overlap(values) else WAITED_FOR}"
    return name, times * whole_bytes * (num_ranks - 1) // num_ranks


def group_of(name: str) -> tuple[int, int, int]:
    """Return the ranks of a collective by its name: how many, how far neighbours are apart, and all of the training."""
    found = GROUP.search(name)
    assert found is not None
    return int(found[1]), int(found[2] or 1), int(found[3] or found[1])


@cache
def _kind(operator: Any) -> str | None:
    if operator.namespace not in LIBRARIES:
        return None
    name = operator.overloadpacket.__name__.lstrip("_")
    return next((kind for kind, names in KINDS.items() if name.startswith(names)), None)


def _ranks(values: Mapping[str, Any]) -> list[int]:
    if (boxed := values.get("process_group")) is not None:
        return dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed))
    group = values["group_name"]
    if isinstance(group, str):  # else it is the group itself, as since torch 2.13
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type, attr-defined]
    return dist.get_process_group_ranks(group)


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
