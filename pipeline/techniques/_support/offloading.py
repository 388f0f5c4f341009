"""Saved tensors that wait in host memory for the backward pass, through torch's saved-tensor hooks.

On CUDA they are copied beside the computation, on a stream of their own and in pinned memory: neither the host nor the
computation waits for a copy that has not been asked for. All device memory belongs to the stream of the computation,
which waits for the copy before the memory is reused, so the allocator does the same in every run.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

HOST = torch.device("cpu")
"""Where saved tensors wait; the host of a simulated card takes its place."""
NUM_LEAVING = 2
"""Storages that may be on their way to the host; they keep their memory on the device until then."""
NUM_RETURNING = 1
"""Storages that are on their way back while the backward pass uses another."""


class Offloading:
    """The hooks, for all forward passes of a run."""

    def __init__(self, smallest_bytes: float) -> None:
        """Offload storages of at least `smallest_bytes`."""
        self._smallest_bytes = smallest_bytes
        self._device: torch.device | None = None
        self._excluded: set[int] = set()
        self._known: weakref.WeakValueDictionary[tuple[int, int], _Waiting] = weakref.WeakValueDictionary()
        self._order: list[weakref.ref[_Waiting]] = []
        self._leaving: deque[weakref.ref[_Waiting]] = deque()
        self._stream: torch.cuda.Stream | None = None

    def hooks(self) -> saved_tensors_hooks:
        """Return a context in which the tensors that autograd saves are offloaded."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def compute_on(self, device: torch.device) -> None:
        """Offload what is on this device, which is called before the first tensor is saved."""
        if self._device is None:
            self._device = device
            self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these tensors where they are."""
        self._excluded.update(map(_address, tensors))

    def _pack(self, tensor: Tensor) -> "Tensor | _View":
        if not self._is_offloaded(tensor):
            return tensor
        key = _address(tensor), tensor._version
        waiting = self._known.get(key)  # views of one storage are copied once
        if waiting is None:
            waiting = self._known[key] = self._send(tensor)
        return _View(waiting, tensor)

    def _unpack(self, packed: "Tensor | _View") -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        is_first_use = not packed.waiting.is_used
        tensor = packed.tensor()
        if is_first_use:
            self._fetch_before(packed.waiting)
        return tensor

    def _is_offloaded(self, tensor: Tensor) -> bool:
        return (
            tensor.layout is torch.strided
            and tensor.dtype != torch.int64  # indices
            and tensor.device == self._device
            and tensor.untyped_storage().nbytes() >= max(1.0, self._smallest_bytes)
            and _address(tensor) not in self._excluded
            and not (tensor.is_conj() or tensor.is_neg() or is_traceable_wrapper_subclass(tensor))
        )

    def _send(self, tensor: Tensor) -> "_Waiting":
        """Begin to copy a storage to the host, and wait for the copies before the last ones."""
        while self._order and self._order[-1]() is None:  # of a backward pass that has ended
            self._order.pop()
        waiting = _Waiting(tensor, self._stream, len(self._order))
        self._order.append(weakref.ref(waiting))
        self._leaving.append(weakref.ref(waiting))
        if len(self._leaving) > NUM_LEAVING:
            first = self._leaving.popleft()()
            if first is not None:
                first.leave()
        return waiting

    def _fetch_before(self, waiting: "_Waiting") -> None:
        """Begin to copy back what the backward pass uses next: what was saved before."""
        num_returning = 0
        for position in range(waiting.position - 1, -1, -1):
            earlier = self._order[position]()
            if earlier is not None and (earlier.device_copy is None or earlier.is_returning):
                earlier.fetch()
                num_returning += 1
                if num_returning == NUM_RETURNING:
                    return


class _Waiting:
    """A storage that waits on the host; it is on the device too until it has left, and from its return on."""

    def __init__(self, tensor: Tensor, stream: "torch.cuda.Stream | None", position: int) -> None:
        storage = tensor.untyped_storage()
        self.position = position
        self.storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # its address stays unique
        self.is_returning = self.is_used = False
        self._stream = stream
        self._device = tensor.device
        flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
        self.device_copy: Tensor | None = flat
        self._host_copy: Tensor | None = torch.empty_like(flat, device=HOST, pin_memory=stream is not None)
        self._end = self._copy(flat, self._host_copy)

    def leave(self) -> None:
        """Free the memory on the device, after the copy to the host."""
        self._await_copy()
        if not self.is_returning:
            self.device_copy = None

    def fetch(self) -> None:
        """Begin to copy the storage back, unless it is on the device."""
        if self.device_copy is not None:
            return
        assert self._host_copy is not None  # it left
        self.device_copy = torch.empty_like(self._host_copy, device=self._device, pin_memory=False)
        self._end, self.is_returning = self._copy(self._host_copy, self.device_copy), True

    def arrived(self) -> Tensor:
        """Return the storage on the device, as a tensor of one axis, after the copy back."""
        self.fetch()
        self.is_used = True
        if self.is_returning:
            self._await_copy()
            self._host_copy, self.is_returning = None, False
        assert self.device_copy is not None  # fetch() has set it
        return self.device_copy

    def _copy(self, source: Tensor, target: Tensor) -> "torch.cuda.Event | None":
        """Begin a copy after all work so far; return the event of its end, if it is beside the computation."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def _await_copy(self) -> None:
        """Let the computation, not the host, wait for the end of the copy."""
        if self._end is not None:
            torch.cuda.current_stream(self._device).wait_event(self._end)
            self._end = None

    def __del__(self) -> None:
        """Wait for a copy whose result nobody asked for, before its memory is reused."""
        if self.is_returning:
            self._await_copy()


class _View:
    """A saved tensor: a view of a storage that waits."""

    def __init__(self, waiting: _Waiting, tensor: Tensor) -> None:
        self.waiting = waiting
        self._dtype, self._form = tensor.dtype, (tensor.size(), tensor.stride(), tensor.storage_offset())

    def tensor(self) -> Tensor:
        """Return it on the device."""
        flat = self.waiting.arrived()
        return (flat if flat.dtype == self._dtype else flat.view(self._dtype)).as_strided(*self._form)


def _address(tensor: Tensor) -> int:
    """Return what identifies a storage while it, or a weak reference to it, exists."""
    return int(tensor.untyped_storage()._cdata)


def offload_saved_tensors(layers: Iterable[nn.Module], smallest_bytes: float) -> None:
    """Offload what the forward pass of these layers saves, in storages of at least `smallest_bytes`.

    Their parameters and buffers stay. The hooks are outside of a layer's own checkpoint: of a checkpointed layer, its
    inputs are offloaded. What the head and the loss save is needed again at once and stays on the device.
    """
    offloading = Offloading(smallest_bytes)
    for layer in layers:
        _enter_around(layer, offloading)


def _enter_around(layer: nn.Module, offloading: Offloading) -> None:
    """Enter the hooks around each forward pass of a layer, which is on its device from the first one on."""
    hooks, is_known = offloading.hooks(), False

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal is_known
        if not is_known:
            state = [*layer.parameters(), *layer.buffers()]
            tensors = (one for one in (*state, *tree_leaves((args, kwargs))) if isinstance(one, Tensor))
            offloading.compute_on(next(tensors).device)
            offloading.exclude(state)
            is_known = True
        hooks.__enter__()

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(lambda *_: hooks.__exit__(), always_call=True)


def offloaded_checkpoint() -> Callable[..., Any]:
    """Return torch.utils.checkpoint for all layers of a model, with their inputs on the host."""
    offloading = Offloading(smallest_bytes=0)

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        named = {**getattr(function, "keywords", {}), **kwargs}  # transformers binds a layer's named inputs
        inputs = (*args, *named.values())
        offloading.compute_on(next(each.device for each in inputs if isinstance(each, Tensor)))
        with offloading.hooks():
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    return run
