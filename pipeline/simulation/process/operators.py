"""Notes the operator whose allocation fails on a card: what it was given, what it would have made, and for whom.

It runs inside the user's process and imports the standard library and torch alone. The file PID.operator in the folder
that SIMULATED_CARD_REPORT names is what `prediction/commands/failed_allocation.py` reads.
"""

import ctypes
import json
import linecache
import os
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FOLDER = "SIMULATED_CARD_REPORT"
"""Variable that names the folder of what processes did."""
TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120
ASSIGNED = re.compile(r"\s*([\w.\[\]\"']+)(?:: [^=]+)? = ")
"""A line of code that gives a name to what it makes."""


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator as ever, and notes the one that finds no memory."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: torch.compile compiles nothing under a dispatch mode that is none of its own."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        subclasses = [kind for kind in types if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__]
        if subclasses and FakeTensor not in subclasses:
            return NotImplemented  # a subclass says what it is made of
        try:
            return func(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            content = {"operator": str(func), "made": _made(func, args, kwargs), **_named()}
            Path(os.environ[FOLDER], f"{os.getpid()}.operator").write_text(json.dumps(content))
            raise


def _made(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return shape, type and bytes of what an operator makes; nothing if torch cannot say it without memory."""
    try:
        made = func(*tree_map(_without_memory, args), **tree_map(_without_memory, kwargs))
    except Exception:  # any error of an operator that has no implementation for shapes alone
        return []
    found = [it for it in tree_leaves(made) if isinstance(it, torch.Tensor)]
    return [[list(it.shape), str(it.dtype).removeprefix("torch."), it.numel() * it.element_size()] for it in found]


def _without_memory(it: Any) -> Any:
    if isinstance(it, torch.Tensor):
        return torch.empty_strided(it.shape, it.stride(), dtype=it.dtype, device="meta")
    return torch.device("meta") if isinstance(it, torch.device) else it


def _named() -> dict[str, str | None]:
    """Return the module that runs the operator and the variable that is to hold what it makes, or the backward node."""
    modules: list[torch.nn.Module] = []
    variable = None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, torch.nn.Module):
            modules.append(own)
        if variable is None and not frame.f_code.co_filename.startswith(TORCH):
            assigned = ASSIGNED.match(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
            variable = "" if assigned is None else assigned[1]
        frame = frame.f_back
    node = getattr(torch._C, "_current_autograd_node", lambda: None)()
    return {
        "module": _path_of(modules),
        "variable": variable or None,
        "node": None if node is None else node.name(),
    }


def _path_of(modules: list[torch.nn.Module]) -> str | None:
    """Return the dotted name that the innermost of nested modules has in the outermost."""
    if not modules:
        return None
    return (
        next((name for name, one in modules[-1].named_modules() if one is modules[0]), None)
        or type(modules[0]).__name__
    )


if __name__ == "simulated_card_hook":
    ctypes.CDLL(None).card_looks_on()
    Operators().__enter__()  # type: ignore[no-untyped-call]
