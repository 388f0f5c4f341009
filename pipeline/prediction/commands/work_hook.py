"""Counts the work of one optimizer step of a command on a simulated card, in the command's own process.

The step comes after those whose memory is recorded, since torch allocates otherwise while operators are counted. The
file PID.work in the folder that SIMULATED_CARD_REPORT names has the work of its passes and that of its update.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

FOLDER = "SIMULATED_CARD_REPORT"
"""Variable that names the folder of what processes did."""
OWN_PACKAGE = Path(__file__).parents[2]
TRITON = {
    "torch._inductor.runtime.triton_heuristics": "CachingAutotuner",
    "torch._inductor.triton_heuristics": "CachingAutotuner",  # until torch 2.4
    "triton.runtime.jit": "JITFunction",
}
"""Classes whose method `run` launches a kernel of Triton: torch.compile's, and those written by hand."""
TEMPLATES = "triton_tem"
"""How torch.compile begins the names of kernels that compute products: FlexAttention, and GEMMs that it has timed."""
LAUNCHES = "triton_kernel_wrapper"
"""How the names of operators begin that launch a kernel of Triton, which counts by itself."""
IN_PLACE = "in_out_ptr"
"""How torch.compile begins the names of what a kernel both reads and writes."""


class WorkOfStep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of every operator while it is active."""

    supports_higher_order_operators = True

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter, self._end = _work_counter(), end
        self._passes: Any = None
        self._is_whole, self._is_in_operator, self._is_active = True, False, False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: torch.compile compiles nothing under a dispatch mode that is none of its own."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        subclasses = [kind for kind in types if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__]
        if subclasses and FakeTensor not in subclasses:
            return NotImplemented  # a subclass says what it is made of
        self._is_active = True
        self._is_in_operator = isinstance(func, OpOverload)  # whose kernels are its own, and count with it
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self._is_in_operator = False
        if not subclasses:
            self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        if isinstance(operator, HigherOrderOperator):  # as that which runs another with a state of random numbers
            inner = next((number for number, arg in enumerate(args) if isinstance(arg, OpOverload)), None)
            if inner is None:  # what it runs is not seen
                self._is_whole &= operator.__name__.startswith(LAUNCHES)
                return
            operator, args = args[inner], args[inner + 1 :]
        try:
            self._counter.count(operator, args, kwargs, result, {})
        except Exception:  # an error of counting is none of the command's
            self._is_whole = False

    def count_triton(self) -> None:
        """Count what kernels of Triton move that no operator launches: each of their tensors is read or written."""
        kinds = [getattr(sys.modules.get(module), name, None) for module, name in TRITON.items()]
        for kind in dict.fromkeys(filter(None, kinds)):
            kind.run = self._counted(kind.run)

    def _counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_in_operator and not kwargs.get("warmup"):
                try:
                    self._count_kernel(getattr(kernel, "fn", kernel), args, kwargs)
                except Exception:  # as above
                    self._is_whole = False
            return run(kernel, *args, **kwargs)

        return counted

    def _count_kernel(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._is_whole &= not getattr(function, "__name__", "").startswith(TEMPLATES)
        names = getattr(function, "arg_names", ())
        in_place = [value for name, value in zip(names, args, strict=False) if name.startswith(IN_PLACE)]
        tensors = [value for value in (*args, *kwargs.values(), *in_place) if isinstance(value, torch.Tensor)]
        self._counter.count_kernel(sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    def before_update(self, *_: Any) -> None:
        """Note the work of the passes, if they were seen: a mode that begins in a compiled update ends with it."""
        self._is_active = False
        torch.empty(0)
        self._is_whole &= self._is_active
        self._passes = self._passes or self._counter.take_phase()

    def after_update(self, *_: Any) -> None:
        """Write the work, and end the process."""
        if self._is_whole:
            work = {"passes": asdict(self._passes), "update": asdict(self._counter.take_phase())}
            Path(os.environ[FOLDER], f"{os.getpid()}.work").write_text(json.dumps(work))
        self._end()


def _work_counter() -> Any:
    """Return a counter of Fitproof's; the user may have a package of the same name, which stays as it is."""
    name = OWN_PACKAGE.name
    users = {each: sys.modules.pop(each) for each in [*sys.modules] if each.partition(".")[0] == name}
    sys.modules[name] = package = ModuleType(name)
    package.__path__ = [str(OWN_PACKAGE)]
    try:
        from pipeline.memory.work_counter import WorkCounter

        return WorkCounter("cuda")
    finally:
        for each in [each for each in sys.modules if each.partition(".")[0] == name]:
            del sys.modules[each]
        sys.modules.update(users)


def count_next_step(end: Callable[[], None]) -> None:
    """Count the work of the next optimizer step of this process, and end it then."""
    from torch.optim import optimizer

    try:
        mode = WorkOfStep(end)
        mode.count_triton()
        disable: Any = torch.compiler.disable if "torch._dynamo" in sys.modules else lambda it: it  # it takes seconds
        optimizer.register_optimizer_step_pre_hook(disable(mode.before_update))
        optimizer.register_optimizer_step_post_hook(disable(mode.after_update))
    except Exception:  # Fitproof's code does not run on this Python or torch
        end()
    sys.excepthook = lambda *_: end()  # the memory is recorded: what happens now is no failure of the command
    torch.save = lambda *_, **__: end()
    mode.__enter__()  # type: ignore[no-untyped-call]


if __name__ == "simulated_card_hook":
    torch._simulated_card_next_step = count_next_step  # type: ignore[attr-defined]
