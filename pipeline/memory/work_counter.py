"""Counts the work of a training run, operator by operator."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.memory.attention_saved import is_keeping_attention
from pipeline.memory.collectives import find_collective, num_bytes
from pipeline.memory.flops import FORMULAS
from pipeline.memory.work import ATTENTION, SENT, Work, work_of

aten = torch.ops.aten
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""Returns the hooks of saved tensors that are in force, or None."""
WITHOUT_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
"""Operators that launch nothing, although their schema does not call them views."""
COPIES = (aten._to_copy.default, aten.copy_.default)
"""Operators whose result may be on another device than their argument."""
ONLY_WRITTEN = ("zero_", "fill_", "copy_")
"""Operators that write their first argument and do not read it."""
LOOKED_UP = {
    aten.embedding: 0,
    aten.gather: 0,
    aten.index: 0,
    aten.index_select: 0,
    aten.nll_loss_forward: 0,
    aten.nll_loss_backward: 1,
}
"""The argument of which an operator reads only what its indices name: no more than it writes."""
SCATTERED = (aten.scatter_add_.default,)
"""Operators that change of their first argument only what their indices name."""


class CallWork(NamedTuple):
    """The work of one call of an operator, which is the same for arguments of the same form."""

    kind: str | None
    """None for floating-point operations, whose type depends on the precision that is set."""
    amount: int


Memo = dict[str, CallWork | None]
"""What was found of calls of one form: `work`."""


class WorkCounter:
    """Adds up the work of operators for a device of this type."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._of_phase = Counter[str]()

    def count(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, memo: Memo) -> None:
        """Add the work of one call of an operator; calls with arguments of the same form share a memo."""
        if "work" not in memo:
            memo["work"] = _work_of_call(operator, args, kwargs, result, self._device_type)
        work = memo["work"]
        if work is not None:
            kind = work.kind or _compute_type(args) + ATTENTION * _is_attention(operator)
            self._of_phase[kind] += work.amount
            self._of_phase["num_kernels"] += 1
            if num_python_calls := (saved_tensors_hooks(True) is not None) + is_keeping_attention():
                self._of_phase["num_python_calls"] += num_python_calls

    def count_kernel(self, moved_bytes: int) -> None:
        """Add a kernel that no operator launches, and that moves so many bytes."""
        self._of_phase["moved_bytes"] += moved_bytes
        self._of_phase["num_kernels"] += 1

    def take_phase(self) -> Work:
        """Return the work since the last call."""
        work = work_of(self._of_phase)
        self._of_phase.clear()
        return work


def _work_of_call(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, device_type: str
) -> CallWork | None:
    """Return the work of one call of an operator; None if it launches no kernel."""
    if not _has_kernel(operator):
        return None
    if (collective := find_collective(operator, args, kwargs, result)) is not None:
        name, sent_bytes = collective
        return CallWork(f"{SENT}{name}", sent_bytes)
    if (formula := FORMULAS.get(operator.overloadpacket)) is not None:
        return CallWork(None, int(formula(*args, **kwargs, out_val=result)))
    if operator in COPIES and _device(result) != _device(args[operator is aten.copy_.default]):
        return CallWork("host_bytes", num_bytes(result))
    moved_bytes = _moved_bytes(operator, args, result)
    kind = "host_bytes" if device_type == "cuda" and _is_on_host(args) else "moved_bytes"
    return CallWork(kind, moved_bytes) if moved_bytes else None


def _moved_bytes(operator: Any, args: tuple[Any, ...], result: Any) -> int:
    """Return the bytes that one call of an operator reads and writes."""
    if operator in SCATTERED:
        index, source = args[2:4]
        return num_bytes(index) + 3 * num_bytes(source)  # read, added to what is read, written
    not_read, written = _not_read(operator), num_bytes(result)
    if not written:  # an operator on lists, which changes its arguments
        written = sum(num_bytes(args[number]) for number in _written(operator) if number < len(args))
    return written + sum(num_bytes(arg) for number, arg in enumerate(args) if number != not_read)


def _device(tensor: Tensor) -> str:
    return tensor.device.type


def _is_on_host(args: tuple[Any, ...]) -> bool:
    """Whether an operator takes tensors with axes, alone or in lists, and all of them are in host memory."""
    lists = (arg if isinstance(arg, list | tuple) else (arg,) for arg in args)
    devices = {_device(part) for parts in lists for part in parts if isinstance(part, Tensor) and part.ndim}
    return devices == {"cpu"}


def _compute_type(args: tuple[Any, ...]) -> str:
    """Return the type in which a product of these arguments is computed."""
    dtype = next(_tensors(args)).dtype
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return str(dtype).removeprefix("torch.")


def _tensors(args: tuple[Any, ...]) -> Iterator[Tensor]:
    return (arg for arg in args if isinstance(arg, Tensor))


@cache
def _has_kernel(operator: Any) -> bool:
    """Whether an operator launches a kernel: not if it only makes a view, changes one's shape, or allocates memory."""
    if torch.Tag.inplace_view in operator.tags or operator.overloadpacket.__name__ in WITHOUT_KERNEL:
        return False
    aliases = [part.alias_info for part in operator._schema.returns]
    return not any(alias is not None and not alias.is_write for alias in aliases)


@cache
def _is_attention(operator: Any) -> bool:
    """Whether an operator computes attention in one kernel."""
    return bool(operator.overloadpacket.__name__.startswith("_scaled_dot_product"))


@cache
def _not_read(operator: Any) -> int | None:
    """Return the number of the argument whose values an operator does not read, or reads only in few places."""
    if operator.overloadpacket.__name__ in ONLY_WRITTEN:
        return 0
    return LOOKED_UP.get(operator.overloadpacket)


@cache
def _written(operator: Any) -> tuple[int, ...]:
    """Return the numbers of the arguments that an operator changes."""
    arguments = operator._schema.arguments
    return tuple(n for n, part in enumerate(arguments) if part.alias_info is not None and part.alias_info.is_write)
