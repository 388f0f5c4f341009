"""A recorder of storage lifetimes: a dispatch mode that records every storage of a training run.

It sees the operators that pass through torch's dispatcher, on real tensors of any device and on fake ones. It does not
see what an operator allocates inside its kernel; a function that predicts it can be given.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.base.contracts import Trainable
from pipeline.memory.gradient_sums import calibrate, in_backward, is_in_place_sum
from pipeline.memory.inside import Buffer, InsideOf, nothing_inside
from pipeline.memory.timeline import PhaseWork, Span, Storage, Timeline
from pipeline.memory.work_counter import Memo, WorkCounter

OUTSIDE = {"load": "", "forward": "loss", "backward": "loss", "optimizer": "optimizer"}
"""The module name of storages that are allocated outside of all modules, by phase."""
GET_DEVICE = torch.ops.prim.device.default
"""Called several times for each operator on fake tensors; it allocates nothing."""
LOADED = "loaded"
"""The operator of what was there when the recording began."""
Run = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], tuple[Any, Memo]]
"""(operator, its arguments) -> its result, and a memo that calls of the same form share."""


def _in_python() -> Mapping[Any, Callable[[tuple[Any, ...]], Any]]:
    """Return the functions that compute operators written in Python, of others, from their arguments, if torch has any.

    Those are what allocates and computes.
    """
    try:
        module = import_module("torch.nn.modules.linear_cross_entropy")
        accumulate = module._linear_cross_entropy_batch_chunked_accumulator
    except (ImportError, AttributeError):
        return {}

    def chunked(args: tuple[Any, ...]) -> Any:
        *inputs, _, hidden_gradient, weight_gradient, bias_gradient = args  # without allow_retain_graph
        return accumulate(*inputs, hidden_gradient, weight_gradient, bias_gradient)

    return {torch.ops.torch_nn._linear_cross_entropy_batch_chunked.default: chunked}


IN_PYTHON = _in_python()


def passed_on(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Memo]:
    """Run an operator through torch's dispatcher."""
    return func(*args, **kwargs), {}


class LifetimeRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records storage lifetimes on one kind of device while it is active; enter it before the model is built."""

    def __init__(self, device: torch.device, inside_of: InsideOf = nothing_inside, run: Run = passed_on) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        calibrate()
        self._device_type, self._inside_of, self._run = device.type, inside_of, run
        self._storages: list[Storage] = []
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """The number of each storage that is alive, and what notices its release, by its key."""
        self._events: list[int] = []
        self._seconds: list[float] = []
        self._counter = WorkCounter(device.type)
        self._work: list[PhaseWork] = []
        self._step, self._loading, self._in_forward = 0, True, False
        self._spans: list[Span] = [Span(step=0, phase="load", begin=0)]
        self._modules: list[str] = []
        self._layers: tuple[str, ...] = ()
        self._module_of_node: dict[int | None, str] = {}
        self._module: nn.Module | None = None
        self._optimizer: Optimizer | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and skipping dynamo costs as much as recording."""
        return False

    @contextmanager
    def watching(self, trainable: Trainable, optimizer: Optimizer) -> Iterator[Self]:
        """Attribute storages to modules, and to parameters, gradients and optimizer state, inside this context."""
        self._module, self._optimizer = trainable.module, optimizer
        names = {part: name for name, part in trainable.module.named_modules()}
        self._layers = tuple(f"{names[layer]}." for layer in trainable.layers)
        handles = (
            register_module_forward_pre_hook(lambda part, _: self._modules.append(names.get(part, ""))),
            register_module_forward_hook(lambda part, *_: self._leave(names.get(part, "")), always_call=True),
        )
        try:
            with patch.object(torch.UntypedStorage, "resize_", self._resizer()):
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def begin_later(self, step: int) -> None:
        """Begin with optimizer step `step`: record what model and optimizer have by then as if it were loaded."""
        owned = list(self._owned())
        for tensor, _, _ in owned:
            if tensor.device.type == self._device_type:
                self._note(_own_part(tensor), LOADED, None, None)
        self._categorize(owned)
        self._work.append(PhaseWork(step=step, phase="load", work=self._counter.take_phase()))
        self._step, self._loading = step, False

    def mark(self, step: int, phase: str) -> None:
        """Record the end of a phase of optimizer step `step`."""
        self._work.append(PhaseWork(step=step, phase=phase, work=self._counter.take_phase()))
        if phase in ("backward", "optimizer"):
            self._categorize(self._owned())
        self._loading = self._in_forward = False
        if phase == "optimizer":
            self._step = step + 1

    def timeline(self) -> Timeline:
        """Return the timeline recorded so far."""
        self._categorize(self._owned())
        first = self._seconds[0] if self._seconds else 0.0
        return Timeline(
            storages=tuple(map(replace, self._storages)),  # copies: those of the recorder go on
            events_E=np.array(self._events, np.int64),
            seconds=tuple(moment - first for moment in self._seconds),
            spans=tuple(self._spans),
            work=tuple(self._work),
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and record the storages that it allocated."""
        if func is GET_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its operators on this rank's part come here next
        kwargs = kwargs or {}
        if func in IN_PYTHON:
            with self:
                return IN_PYTHON[func](args)
        inside, buffers = self._inside_of(func, args), dict[Buffer, int]()
        self._follow(inside.before, func, buffers)
        in_place = is_in_place_sum(func, args)
        result, memo = self._run(func, args, kwargs)
        self._counter.count(func, args, kwargs, result, memo)
        if in_place:
            self._pass_on(args[0], result)
        tensors = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        for number, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device_type:
                self._note(tensor, func, inside.result_bytes, _source(args, result, number))
        self._follow(inside.after, func, buffers)
        return result

    def _resizer(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """Return resize_() of a storage that records it: FSDP2 frees gathered parameters that tensors still have."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            if (freed := self._alive.pop(storage._cdata, None)) is not None:
                self._end(freed[0])
            if num_bytes and storage.device.type == self._device_type:
                shape = (num_bytes,)
                self._guard(storage, self._begin(num_bytes, shape, torch.uint8, "all_gather", "parameters"))
            return result

        return resized

    def _follow(self, changes: Iterable[Buffer], func: Any, buffers: dict[Buffer, int]) -> None:
        """Allocate and free what an operator allocates inside its kernel."""
        for buffer in changes:
            if buffer in buffers:
                self._end(buffers.pop(buffer))
            else:
                size = buffer.num_bytes
                buffers[buffer] = self._begin(size, (size,), torch.uint8, f"inside {_name(func)}", "temporary")

    def _pass_on(self, tensor: Tensor, result: Tensor) -> None:
        """Let the result of an operator continue the lifetime of a storage that it reuses."""
        if (reused := self._alive.pop(tensor.untyped_storage()._cdata, None)) is not None:
            self._guard(result.untyped_storage(), reused[0])

    def _note(self, tensor: Tensor, func: Any, num_bytes: int | None, source: object) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            size = storage.nbytes() if num_bytes is None else num_bytes
            if size:
                number = self._begin(size, tuple(tensor.shape), tensor.dtype, _name(func))
                if self._storages[number].module == "optimizer":
                    self._storages[number].module = self._owner(source)
                self._guard(storage, number)

    def _owner(self, source: object) -> str:
        """Return the module of the gradient that the optimizer's phase computes from, for its norm for example."""
        found = self._alive.get(source.untyped_storage()._cdata) if isinstance(source, Tensor) else None
        return "optimizer" if found is None else self._storages[found[0]].module

    def _guard(self, storage: torch.UntypedStorage, number: int) -> None:
        """Record the release of a storage as the end of storage `number`."""
        key = storage._cdata

        def release(_: object) -> None:
            del self._alive[key]
            self._end(number)

        self._alive[key] = number, weakref.ref(storage, release)

    def _begin(
        self, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype, operator: str, category: str | None = None
    ) -> int:
        last, phase = self._spans[-1], self._phase
        if (last.step, last.phase) != (self._step, phase):
            self._spans.append(Span(step=self._step, phase=phase, begin=len(self._events)))
        number = len(self._storages)
        self._storages.append(
            Storage(
                num_bytes=num_bytes,
                shape=shape,
                dtype=str(dtype).removeprefix("torch."),
                operator=operator,
                module=self._current_module(),
                category=category or ("activations" if torch.is_grad_enabled() else "temporary"),
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
        if self._modules or torch.is_grad_enabled():
            self._in_forward = True  # up to its end: a loss that computes its own gradients records no graph
        return "forward" if self._in_forward else "optimizer"

    def _record(self, event: int) -> None:
        self._events.append(event)
        self._seconds.append(time.perf_counter())

    def _end(self, number: int) -> None:
        storage = self._storages[number]
        if storage.category == "activations" and torch.is_grad_enabled():
            storage.category = "temporary"  # freed before the backward pass
        self._record(-1 - number)

    def _current_module(self) -> str:
        """Return the module of the current operator: in a backward pass, the one whose forward pass made the node."""
        node = torch._C._current_autograd_node()
        if self._modules:
            name = self._modules[-1]
        else:
            name = self._module_of_node.get(node._sequence_nr() if node else None, OUTSIDE[self._phase])
        if not torch.is_grad_enabled():
            if self._modules:  # a torch.autograd.Function: its node is made before its forward pass
                self._module_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, name)
            return name
        if node and not self._modules:  # a layer that is recomputed, whose hooks do not run
            name = next((layer[:-1] for layer in self._layers if f"{name}.".startswith(layer)), name)
        self._module_of_node[torch._C._autograd._get_sequence_nr() - 1] = name  # the node made last is this operator's
        return name

    def _leave(self, name: str) -> None:
        """Pop a module that has ended, and those inside it that an exception has ended."""
        while self._modules and self._modules.pop() != name:
            pass

    def _categorize(self, owned: Iterable[tuple[Tensor, str, str]]) -> None:
        """Set the category and module of parameters, gradients and optimizer state that are alive."""
        for tensor, category, owner in owned:
            if (found := self._alive.get(_own_part(tensor).untyped_storage()._cdata)) is not None:
                storage = self._storages[found[0]]
                storage.category, storage.module = category, owner

    def _owned(self) -> Iterator[tuple[Tensor, str, str]]:
        """Yield the tensors of model and optimizer, each with its category and the module that it belongs to."""
        if self._module is None or self._optimizer is None:
            return
        for name, buffer in self._module.named_buffers():
            yield buffer, "parameters", name.rpartition(".")[0]
        for name, parameter in self._module.named_parameters():
            owner = name.rpartition(".")[0]
            for part in (parameter, *_quantization(getattr(parameter, "quant_state", None))):
                yield part, "parameters", owner
            if parameter.grad is not None:
                yield parameter.grad, "gradients", owner
            for value in self._optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor):
                    yield value, "optimizer state", owner


def _own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def _source(args: tuple[Any, ...], result: Any, number: int) -> object:
    """Return the argument from which the result `number` was computed: of an operator on lists, one of its parts."""
    first = args[0] if args else None
    if isinstance(first, list | tuple) and isinstance(result, list | tuple) and len(first) == len(result):
        return first[number]
    return first


def _quantization(state: Any) -> Iterator[Tensor]:
    """Yield the scales and codes of a 4-bit parameter, of which some are quantized themselves (bitsandbytes)."""
    if state is not None:
        yield from (part for part in (state.absmax, state.code, state.offset) if isinstance(part, Tensor))
        yield from _quantization(state.state2)


def _name(operator: Any) -> str:
    return operator if isinstance(operator, str) else str(operator.__name__).partition(".")[0]
