"""Values of small tensors on a simulated card, computed on the host: what a card that computes nothing cannot say.

Each operator runs on the card, as ever; if it is about small tensors, it then runs on their shadows on the host too.
What the program reads is the shadow. An operator whose output's size depends on values is told that size while it runs,
so it allocates on the card what it would have.

A shadow is known if all that it was computed from is: what the program put on the card, and what it computed from that.
One that is not (numbers of a model, random ones) still holds the best guess, and its reading is reported.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
LARGEST = 2**20
"""Bytes of the largest storage that has a shadow."""
MOST_SHADOWS = 20_000
"""Number from which on those of freed storages are removed."""
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
OVERWRITES = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
"""Operators after which nothing is left of what a tensor held."""
UNDEFINED = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
MASKED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
COUNTS: dict[Any, Callable[[Any, tuple[Any, ...]], list[int]]] = {
    aten.nonzero.default: lambda out, args: [out.shape[0]],
    aten.masked_select.default: lambda out, args: [out.shape[0]],
    aten.repeat_interleave.Tensor: lambda out, args: [out.shape[0]],
    aten._unique2.default: lambda out, args: [out[0].shape[0]] * 4,
    aten.unique_dim.default: lambda out, args: [out[0].shape[args[1]]] * 4,
    aten.unique_consecutive.default: lambda out, args: [out[0].shape[0]] * 4,
    aten.bincount.default: lambda out, args: [0, max(0, out.shape[0] - 1)],
}
"""What operators read from the card while they run: of their output on the host and their arguments."""

_card = ctypes.CDLL(None)


@dataclass
class Shadow:
    """What the host knows of a storage on a card."""

    of: StorageWeakRef
    storage: torch.UntypedStorage
    is_known: bool


def _is_on_card(it: Any) -> bool:
    return isinstance(it, torch.Tensor) and it.device.type == "cuda"


def _is_small(it: torch.Tensor) -> bool:
    return it.layout is torch.strided and it.untyped_storage().nbytes() <= LARGEST


def _covers_its_storage(it: torch.Tensor) -> bool:
    return it.numel() * it.element_size() == it.untyped_storage().nbytes()


class Values(TorchDispatchMode):
    """Runs operators about small tensors on the host too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shadows: dict[int, Shadow] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [it for it in leaves if isinstance(it, torch.Tensor)]
        if any(isinstance(it, FakeTensor) for it in tensors):
            return func(*args, **kwargs)
        if any(type(it) not in PLAIN for it in tensors):
            return NotImplemented  # a subclass says what it is made of
        on_card = [it for it in tensors if it.device.type == "cuda"]
        makes = any(isinstance(it, torch.device) and it.type == "cuda" for it in leaves)
        if (not on_card and not makes) or torch.cuda.is_current_stream_capturing():
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if func.namespace != "aten" or not all(map(_is_small, on_card)):
            return self._forget(func, args, func(*args, **kwargs))
        return self._on_both(func, args, kwargs, on_card)

    def _on_both(self, func: Any, args: Any, kwargs: Any, on_card: list[torch.Tensor]) -> Any:
        """Run an operator on the card and on the host, and return what the card gave with the host's values."""
        is_view = any(result.alias_info is not None for result in func._schema.returns) and not func._schema.is_mutable
        if is_view:
            if func is aten.lift_fresh.default and on_card:
                self._adopt(args[0])
            return func(*args, **kwargs)
        found = [self._shadow(it) for it in on_card]
        has_values = func not in UNDEFINED and torch.Tag.nondeterministic_seeded not in func.tags
        is_known = has_values and all(it is not None and it.is_known for it in found)
        if func in OVERWRITES and _is_on_card(args[0]):
            sources = [it for it in on_card if it is not args[0]]
            is_known = all((shadow := self._shadow(it)) is not None and shadow.is_known for it in sources)
            is_known &= _covers_its_storage(args[0]) or self._is_known(args[0])
        if found and not any(found) and func not in OVERWRITES:
            return self._forget(func, args, func(*args, **kwargs))
        if func is aten.copy_.default and not _is_on_card(args[0]):  # to the host: its values come last
            _card.card_reads_are_known(int(is_known))
            func(*args, **kwargs)
            _card.card_reads_are_known(0)
            return self._on_host(func, args, kwargs)
        try:
            expected = self._on_host(func, args, kwargs)
        except Exception:  # an operator of cards alone, or values that it cannot have
            return self._forget(func, args, func(*args, **kwargs))
        with self._told(func, args, expected, is_known):
            real = func(*args, **kwargs)
        self._keep(real, expected, is_known)
        outs = [it for it in tree_leaves(real) if isinstance(it, torch.Tensor)]
        return real if outs else expected

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        state = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        try:
            return func(*tree_map(self._mirror, args), **tree_map(self._mirror, kwargs))
        finally:
            if state is not None:
                torch.set_rng_state(state)

    @contextmanager
    def _told(self, func: Any, args: Any, expected: Any, is_known: bool) -> Iterator[None]:
        """Answer what the operator reads from the card while it runs."""
        if func in MASKED:
            masks = [it for it in args[1] if _is_on_card(it) and it.dtype in (torch.bool, torch.uint8)]
            counts = [int(self._mirror(it).count_nonzero()) for it in masks]
        else:
            counts = COUNTS[func](expected, args) if func in COUNTS else []
        _card.card_answer((ctypes.c_int64 * len(counts))(*counts), len(counts))
        _card.card_reads_are_known(int(is_known))
        try:
            yield
        finally:
            _card.card_answer(None, 0)
            _card.card_reads_are_known(0)

    def _keep(self, real: Any, expected: Any, is_known: bool) -> None:
        """Give the outputs the host's values: on the card their shadows, on the host themselves."""
        for out, value in zip(tree_leaves(real), tree_leaves(expected), strict=False):
            if not isinstance(out, torch.Tensor) or not isinstance(value, torch.Tensor) or out.shape != value.shape:
                continue
            if out.device.type != "cuda":
                _write(out, value)
            elif _is_small(out):
                _write(self._mirror(out), value)
                self._shadows[out.untyped_storage()._cdata].is_known = is_known

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """All ranks do the same: what a rank receives of another is what it sent; a sum is not known."""
        done = func(*args, **kwargs)
        tensors = [it for it in tree_leaves(args) if _is_on_card(it)]
        name = str(func)
        if "gather" in name and all(map(_is_small, tensors)):
            outs, ins = ([it for it in tree_leaves(one) if _is_on_card(it)] for one in args[:2])
            if len(ins) == 1 and (shadow := self._shadow(ins[0])) is not None:
                sent = self._mirror(ins[0]).reshape(-1)
                for out in outs:
                    self._mirror(out).copy_(sent.repeat(out.numel() // max(1, sent.numel())).view(out.shape))
                    self._shadows[out.untyped_storage()._cdata].is_known = shadow.is_known
        elif "broadcast" not in name and "barrier" not in name and "send" not in name:
            for it in tensors:
                self._shadows.pop(it.untyped_storage()._cdata, None)
        return done

    def _adopt(self, it: torch.Tensor) -> None:
        """Take over what torch.tensor() has copied to the card, which a dispatch mode does not see."""
        content = torch.empty(it.untyped_storage().nbytes(), dtype=torch.uint8)
        if _card.card_known(ctypes.c_void_p(content.data_ptr()), ctypes.c_void_p(it.data_ptr()), content.nbytes):
            storage = it.untyped_storage()
            self._shadows[storage._cdata] = Shadow(_weak(storage), content.untyped_storage(), is_known=True)

    def _forget(self, func: Any, args: Any, real: Any) -> Any:
        """Remove the shadows of what an operator wrote that is not run on the host; return its result."""
        if any(result.alias_info is not None for result in func._schema.returns) and not func._schema.is_mutable:
            return real
        written = tree_leaves(real) if not func._schema.is_mutable else [*tree_leaves(real), *_mutated(func, args)]
        for it in written:
            if _is_on_card(it):
                self._shadows.pop(it.untyped_storage()._cdata, None)
        return real

    def _shadow(self, it: torch.Tensor) -> Shadow | None:
        storage = it.untyped_storage()
        found = self._shadows.get(storage._cdata)
        return found if found is not None and found.storage.nbytes() == storage.nbytes() else None

    def _is_known(self, it: torch.Tensor) -> bool:
        shadow = self._shadow(it)
        return shadow is not None and shadow.is_known

    def _mirror(self, it: Any) -> Any:
        """Return the tensor on the host that lies in the shadow of a tensor's storage; other arguments as they are."""
        if isinstance(it, torch.device) and it.type == "cuda":
            return torch.device("cpu")
        if not _is_on_card(it):
            return it
        shadow = self._shadow(it)
        if shadow is None:
            if len(self._shadows) > MOST_SHADOWS:
                self._shadows = {key: one for key, one in self._shadows.items() if not one.of.expired()}  # type: ignore[no-untyped-call]
            storage = it.untyped_storage()
            zeros = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            shadow = self._shadows[storage._cdata] = Shadow(_weak(storage), zeros, is_known=False)
        mirror = torch.empty(0, dtype=it.dtype)
        return mirror.set_(shadow.storage, it.storage_offset(), it.size(), it.stride())


def _write(to: torch.Tensor, value: torch.Tensor) -> None:
    """Copy values, unless they were computed in place or several elements share a place."""
    if to.untyped_storage()._cdata != value.untyped_storage()._cdata and 0 not in to.stride():
        to.copy_(value)


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _mutated(func: Any, args: Any) -> list[Any]:
    """Return the arguments that an operator writes to."""
    given = zip((argument.alias_info for argument in func._schema.arguments), args, strict=False)
    return tree_leaves([it for alias, it in given if alias is not None and alias.is_write])


Values().__enter__()  # type: ignore[no-untyped-call]
