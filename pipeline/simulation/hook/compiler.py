"""Lets a process import torch's compiler once something asks for it, and not for the first step of any optimizer.

torch.optim imports torch._dynamo, which takes more than a second, only to keep torch.compile out of functions and to
break its graphs. Before that module is imported nothing is compiled, so both do nothing. As soon as anything imports
it, all is as torch has made it.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

COMPILER = "torch._dynamo"
DISABLED = "__dynamo_disable"
"""Attribute of a function in which torch keeps the one that it calls instead."""
USED_BY_STEP = {
    "torch._dynamo",
    "_dynamo",
    "graph_break",
    "is_grad_enabled",
    "set_grad_enabled",
    "defaults",
    "cast",
    "Optimizer",
}
"""Names that the code uses in which torch.optim wraps a step; where a version uses others it stays as it is."""


class BeforeCompiler(importlib.abc.MetaPathFinder):
    """Finds no module; once the compiler is looked for, it undoes what was changed."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._disable = torch, torch._disable_dynamo
        self._disabled: list[Any] = []
        self._codes: dict[Any, CodeType] = {}

    def begin(self) -> None:
        """Change torch's optimizers, and what is kept out of compiled code from now on."""
        kinds = [it for it in vars(self._torch.optim).values() if isinstance(it, type)]
        for function in {it for kind in kinds for it in vars(kind).values() if hasattr(it, "__wrapped__")}:
            code = getattr(function, "__code__", None)
            if code is None:
                continue
            if {*code.co_names} == USED_BY_STEP:
                self._codes[function] = code
                function.__code__ = _step_code(code)
            elif code.co_filename == self._disable.__code__.co_filename:
                self._call_itself(function.__wrapped__)
        self._torch._disable_dynamo = self._disable_later
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Undo the changes if this is the compiler."""
        if name == COMPILER:
            self._torch._disable_dynamo = self._disable
            while self._codes:
                function, code = self._codes.popitem()
                function.__code__ = code
            while self._disabled:
                delattr(self._disabled.pop(), DISABLED)
        return None

    def _call_itself(self, function: Any) -> None:
        setattr(function, DISABLED, function)
        self._disabled.append(function)

    def _disable_later(self, function: Any = None, recursive: bool = True) -> Any:
        """Do what torch._disable_dynamo does, with a function that calls itself until the compiler is imported."""
        if function is not None and not hasattr(function, DISABLED):
            self._call_itself(function)
        return self._disable(function, recursive)


def _step_code(of: CodeType) -> CodeType:
    """Return the code of an optimizer's step without the compiler, which stacks show in torch's own place."""
    code: CodeType = _with_its_gradients(len).__code__
    return code.replace(co_filename=of.co_filename, co_firstlineno=of.co_firstlineno)


def _with_its_gradients(func: Callable[..., Any]) -> Any:
    """Return a step as torch.optim decorates it, but for the breaks of compiled graphs."""

    def step(*args: Any, **kwargs: Any) -> Any:
        import torch

        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return step


if __name__ == "simulated_card_hook" and COMPILER not in sys.modules:
    BeforeCompiler(sys.modules["torch"]).begin()
