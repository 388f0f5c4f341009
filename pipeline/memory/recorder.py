"""Which tensor lived when, how large it was, and what made it: a record of every storage of a training run.

The recorder sees what passes torch's dispatcher, on real tensors of any device and on fake ones alike. What an operator
allocates inside itself is not seen; it can be told of it.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.base.contracts import Trainable
from pipeline.memory.flops import operations_of
from pipeline.memory.gradient_sums import calibrate, in_backward, is_written_over
from pipeline.memory.timeline import Lifetime, Span, Timeline

OUTSIDE = {"load": "", "forward": "loss", "backward": "loss", "optimizer": "optimizer"}
"""Whose work it is when no module is running."""
ASKS_DEVICE = torch.ops.prim.device.default
"""What fake tensors are asked several times an operator; it makes nothing."""


Workspaces = Callable[[Any, tuple[Any, ...]], Iterable[tuple[int, bool]]]
"""(operator, its arguments) -> the bytes of each thing it allocates inside itself, and whether it keeps it for ever."""


def no_workspaces(*_: object) -> Iterable[tuple[int, bool]]:
    """Know of nothing that operators allocate inside themselves."""
    return ()


Run = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""(operator, its arguments) -> what it makes of them."""


def passed_on(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Let torch's dispatcher run an operator."""
    return func(*args, **kwargs)


class LifetimeRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records births and deaths on one kind of device while it is active; enter it before the model is built."""

    def __init__(self, device: torch.device, workspaces: Workspaces = no_workspaces, run: Run = passed_on) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        calibrate()
        self._device_type, self._hidden, self._run = device.type, workspaces, run
        self._lives: list[Lifetime] = []
        self._by_storage: dict[int, int] = {}
        self._guards: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._events: list[int] = []
        self._seconds: list[float] = []
        self._flops = 0
        self._step, self._loading = 0, True
        self._spans: list[Span] = [Span(step=0, phase="load", begin=0)]
        self._modules: list[str] = []
        self._layers: tuple[str, ...] = ()
        self._module_of_node: dict[int | None, str] = {}
        self._module: nn.Module | None = None
        self._optimizer: Optimizer | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that nothing is compiled here, which would cost as much as the recording."""
        return False

    @contextmanager
    def watching(self, trainable: Trainable, optimizer: Optimizer) -> Iterator[Self]:
        """Know, from here on, whose work each operator is, and which tensors are parameters, gradients and state."""
        self._module, self._optimizer = trainable.module, optimizer
        names = {part: name for name, part in trainable.module.named_modules()}
        self._layers = tuple(f"{names[layer]}." for layer in trainable.layers)
        handles = (
            register_module_forward_pre_hook(lambda part, _: self._modules.append(names.get(part, ""))),
            register_module_forward_hook(lambda part, *_: self._leave(names.get(part, "")), always_call=True),
        )
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()
            self._label()

    def mark(self, step: int, phase: str) -> None:
        """Note the end of a phase of optimizer step `step`, as a Meter does."""
        if phase in ("backward", "optimizer"):
            self._label()
        self._loading = False
        if phase == "optimizer":
            self._step = step + 1

    def timeline(self) -> Timeline:
        """Return what has been recorded up to now."""
        self._label()
        first = self._seconds[0] if self._seconds else 0.0
        return Timeline(
            lives=tuple(self._lives),
            events=tuple(self._events),
            seconds=tuple(moment - first for moment in self._seconds),
            spans=tuple(self._spans),
            flops=self._flops,
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and note the storages that it made."""
        if func is ASKS_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        for_now = []
        for num_bytes, kept in self._hidden(func, args):
            number = self._begin(num_bytes, (num_bytes,), torch.uint8, f"inside {_name(func)}", "temporary")
            for_now += [] if kept else [number]
        written_over = is_written_over(func, args)
        result = self._run(func, args, kwargs)
        self._flops += operations_of(func, args, kwargs, result)
        if written_over:
            self._hand_over(args[0])
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device_type:
                self._note(tensor, func)
        for number in for_now:
            self._end(number)
        return result

    def _hand_over(self, tensor: Tensor) -> None:
        """End the life of a tensor whose storage another takes over."""
        key = tensor.untyped_storage()._cdata
        number = self._by_storage.pop(key, None)
        if number is not None:
            del self._guards[key]
            self._end(number)

    def _note(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._by_storage:
            number = self._begin(storage.nbytes(), tuple(tensor.shape), tensor.dtype, _name(func))
            self._by_storage[key] = number
            self._guards[key] = weakref.ref(storage, self._death_of(key, number))

    def _begin(
        self, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype, operator: str, category: str | None = None
    ) -> int:
        last, phase = self._spans[-1], self._phase
        if (last.step, last.phase) != (self._step, phase):
            self._spans.append(Span(step=self._step, phase=phase, begin=len(self._events)))
        number = len(self._lives)
        self._lives.append(
            Lifetime(
                num_bytes=num_bytes,
                shape=shape,
                dtype=dtype,
                operator=operator,
                module=self._current_module(),
                category=category or ("activations" if torch.is_grad_enabled() else "temporary"),
                born=len(self._events),
            )
        )
        self._record(number)
        return number

    @property
    def _phase(self) -> str:
        if self._loading:
            return "load"
        if in_backward():
            return "backward"
        return "forward" if self._modules or torch.is_grad_enabled() else "optimizer"

    def _record(self, event: int) -> None:
        self._events.append(event)
        self._seconds.append(time.perf_counter())

    def _death_of(self, key: int, number: int) -> Callable[[object], None]:
        def die(_: object) -> None:
            del self._by_storage[key], self._guards[key]
            self._end(number)

        return die

    def _end(self, number: int) -> None:
        life = self._lives[number]
        life.died = len(self._events)
        if life.category == "activations" and torch.is_grad_enabled():
            life.category = "temporary"  # gone before the backward pass could ask for it
        self._record(-1 - number)

    def _current_module(self) -> str:
        """Return whose work it is: in a backward pass, that of the module whose forward pass made the graph's node."""
        node = torch._C._current_autograd_node()
        if self._modules:
            name = self._modules[-1]
        else:
            name = self._module_of_node.get(node._sequence_nr() if node else None, OUTSIDE[self._phase])
        if not torch.is_grad_enabled():
            return name
        if node and not self._modules:  # a layer's own work in its recomputation, which passes its hooks by
            name = next((layer[:-1] for layer in self._layers if f"{name}.".startswith(layer)), name)
        self._module_of_node[torch._C._autograd._get_sequence_nr() - 1] = name  # the node made last is this operator's
        return name

    def _leave(self, name: str) -> None:
        """Forget a module that has ended, and those inside it that an exception has ended."""
        while self._modules and self._modules.pop() != name:
            pass

    def _label(self) -> None:
        """Say of what lives now which are parameters, gradients and optimizer state, and whose."""
        if self._module is None or self._optimizer is None:
            return
        owners = {parameter: name.rpartition(".")[0] for name, parameter in self._module.named_parameters()}
        for name, buffer in self._module.named_buffers():
            self._name(buffer, "parameters", name.rpartition(".")[0])
        for parameter, owner in owners.items():
            self._name(parameter, "parameters", owner)
            self._name(parameter.grad, "gradients", owner)
            for value in self._optimizer.state.get(parameter, {}).values():
                self._name(value, "optimizer state", owner)

    def _name(self, value: object, category: str, owner: str) -> None:
        if isinstance(value, Tensor):
            number = self._by_storage.get(value.untyped_storage()._cdata)
            if number is not None:
                self._lives[number].category, self._lives[number].module = category, owner


def _name(operator: Any) -> str:
    return str(operator.__name__).partition(".")[0]
