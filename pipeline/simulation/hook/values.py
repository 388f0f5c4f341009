"""Values of small tensors on a simulated card, computed on the host: what a card that computes nothing cannot say.

Each operator runs on the card, as ever; if it is about small tensors, it then runs on their shadows on the host too.
What the program reads is the shadow. An operator whose output's size depends on values reads that size from the card
while it runs, and is given it, so it allocates on the card what it would have. One that reads an argument, as
ctc_loss() does its lengths, is given its shadow.

A shadow is known if all that it was computed from is: what the program put on the card, and what it computed from that.
One that is not (numbers of a model, random ones) still holds the best guess, and its reading is reported.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

try:
    from torch._library.custom_ops import OPDEFS as OPERATORS_IN_PYTHON
except ImportError:  # before torch 2.4
    OPERATORS_IN_PYTHON = {}  # type: ignore[assignment]

aten = torch.ops.aten
LARGEST = 2**20
"""Bytes of the largest storage that has a shadow."""
MOST_SHADOWS = 20_000
MOST_BYTES = 2**29
"""Number of shadows and of their bytes from which on some are removed, so that a long run does not fill the host."""
OVERWRITES = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
"""Operators after which nothing is left of what a tensor held."""
UNDEFINED = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
MOST_CHECKS = 4
"""The checks of its arguments that an operator makes, at most."""
MASKED = {
    *(aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default),
    *(aten.masked_select.default, aten._nested_tensor_from_mask.default),
}
"""Operators that read from the card how many elements their masks select, whatever the size of the others."""
COUNTS: dict[Any, Callable[[Any, tuple[Any, ...]], list[int]]] = {
    aten.nonzero.default: lambda out, args: [out.shape[0]],
    aten.repeat_interleave.Tensor: lambda out, args: [out.shape[0]],
    aten._unique2.default: lambda out, args: [out[0].shape[0]] * 4,
    aten.unique_dim.default: lambda out, args: [out[0].shape[args[1]]] * 4,
    aten.unique_consecutive.default: lambda out, args: [out[0].shape[0]] * 4,
    aten.bincount.default: lambda out, args: [0, max(0, out.shape[0] - 1)],
}
"""What operators count in their first argument while they run: from their output on the host and their arguments."""

LAUNCHERS = {
    "triton.runtime.jit": "JITFunction",
    "torch._inductor.runtime.triton_heuristics": "CachingAutotuner",
    "torch._inductor.triton_heuristics": "CachingAutotuner",  # until torch 2.4
}
"""Modules and their classes whose method `run` launches a kernel that is no operator's."""
SCALES = {
    *(aten.max.default, aten.amax.default, aten.std.correction, aten.var.correction),
    *(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.linalg_vector_norm.default),
}
"""Operators whose results programs divide by: of a tensor of which nothing is known they are guessed to be one."""
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
"""Matrix products, whose last argument has the type of their result."""
COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of what ranks do together."""
RECEIVE_NOTHING = ("barrier", "send", "wait", "wrap", "check")
"""What the names of those operators have in them that leave all tensors as they are."""
HALF = (torch.bfloat16, torch.float16)
"""Types in which a host without instructions for them computes products far more slowly than in float32."""
COMPILING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.FUNCTIONAL)
"""The modes under which torch.compile runs a program that it compiles."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that are no more than tensors."""

SOURCE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
UNKNOWN, GUESSED, KNOWN = range(3)
"""What a function of this type knows of what it was asked for."""

ON_CARD = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

_card = ctypes.CDLL(None)


@dataclass
class Shadow:
    """What the host knows of a storage on a card."""

    of: StorageWeakRef
    storage: torch.UntypedStorage
    is_known: bool


class _Running(threading.local):
    """The operator that a thread runs on the card."""

    call: tuple[Any, Any, Any] | None = None
    """The operator, its arguments and those with a name."""
    has_guessed = False
    """Whether it has read what is not known."""


def _is_on_card(it: Any) -> bool:
    """Whether it is a tensor whose storage lies on a card; a sparse one has none, one of several sizes no shape."""
    return isinstance(it, torch.Tensor) and it.device.type == "cuda" and _has_shape(it)


def _has_shape(it: torch.Tensor) -> bool:
    return it.layout is torch.strided and not it.is_nested


def _key(it: torch.Tensor) -> int:
    """Return what tells a tensor's storage from others; the storage itself gets no object in Python.

    With one it would count as used twice for the rest of its life, and autograd add to a copy of it, not in place.
    """
    return int(torch._C._storage_id(it))  # type: ignore[attr-defined]


def _offset_of_size() -> int:
    """Return where torch keeps the bytes of a storage, behind its key."""
    one = torch.empty(LARGEST - 1, dtype=torch.uint8)
    words = (ctypes.c_int64 * 16).from_address(_key(one))
    return list(words).index(len(one)) * ctypes.sizeof(ctypes.c_int64)


OFFSET_OF_SIZE = _offset_of_size()


def _storage_bytes(it: torch.Tensor) -> int:
    return ctypes.c_int64.from_address(_key(it) + OFFSET_OF_SIZE).value


def _is_small(it: torch.Tensor) -> bool:
    return _has_shape(it) and _storage_bytes(it) <= LARGEST


def _is_compiling() -> bool:
    """Whether torch.compile is under way below this mode, whose tensors have no values.

    It sets other modes aside while it compiles, but not where DistributedDataParallel has it compile in parts.
    """
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in COMPILING)


@cache
def _needs_no_values(func: Any) -> bool:
    """Whether an operator of tensors without shadows needs none, and knows nothing of what it gives."""
    if isinstance(func, HigherOrderOperator) or func.namespace != "aten":
        return False
    return not (func in OVERWRITES or func in MASKED or func in COUNTS or func is aten.lift_fresh.default)


@cache
def _is_view(func: Any) -> bool:
    """Whether an operator reads and writes no element: it makes a view, or changes in place what a tensor views."""
    if torch.Tag.inplace_view in func.tags:  # such as set_(), by which torch.load() gives a tensor its storage
        return True
    return any(result.alias_info is not None for result in func._schema.returns) and not func._schema.is_mutable


class Values(TorchDispatchMode):
    """Runs operators about small tensors on the host too."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: torch.compile compiles nothing under a dispatch mode that is none of its own."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shadows: dict[int, Shadow] = {}
        self._num_bytes = 0  # of shadows, with those removed since room was made
        self._running = _Running()
        self._launchers = dict(LAUNCHERS)
        self._captured: set[int] = set()  # keys of what graphs write, whenever one is launched
        torch.cuda.CUDAGraph.replay = self._doubting_captured(torch.cuda.CUDAGraph.replay)  # type: ignore[method-assign]
        self._source = SOURCE(self._fill)
        _card.card_ask(self._source)
        _card.card_looks_on()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._launchers.keys().isdisjoint(
            sys.modules.keys()
        ):  # without keys() it would look at each of thousands
            self._watch_launchers()
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload):  # of which it arrives as it was called
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if _needs_no_values(func) and self._have_no_shadow((*args, *kwargs.values())):
            try:
                outs = func(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # as one that checks its arguments and has read zero: again, with answers
                outs = None
            if outs is not None:
                return self._without_shadow(func, outs)
        leaves = tree_leaves((args, kwargs))
        tensors = [it for it in leaves if isinstance(it, torch.Tensor)]
        if _is_compiling() or any(isinstance(it, FakeTensor) for it in tensors):
            return func(*args, **kwargs)
        if any(type(it).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for it in tensors):
            return NotImplemented  # a subclass says what it is made of
        on_card = [it for it in tensors if it.device.type == "cuda"]
        makes = any(isinstance(it, torch.device) and it.type == "cuda" for it in leaves)
        if not on_card and not makes:
            return func(*args, **kwargs)
        if torch.cuda.is_current_stream_capturing():
            outs = func(*args, **kwargs)
            is_atens = isinstance(func, OpOverload) and func.namespace == "aten"
            written = tree_leaves((outs, _mutated(func, args, kwargs) if is_atens else on_card))
            self._captured.update(map(_key, filter(_is_on_card, written)))
            self._doubt(written)
            return outs
        if isinstance(func, HigherOrderOperator):  # what it runs is not seen here, nor what it writes to
            for it in on_card:
                self._forget(it)
            return func(*args, **kwargs)
        if func.namespace in COLLECTIVES:
            return self._collective(func, args, kwargs)
        if func._schema.name in OPERATORS_IN_PYTHON and all(map(_has_shape, on_card)):
            return self._in_python(func, args, kwargs)
        if func.namespace != "aten" or not all(map(_is_small, on_card)):
            return self._on_card_alone(func, args, kwargs)
        self._make_room()
        return self._on_both(func, args, kwargs, on_card)

    def _watch_launchers(self) -> None:
        """Doubt, from now on, what a kernel is given that is no operator's: it may write to it."""
        for name in self._launchers.keys() & sys.modules.keys():
            kind = getattr(sys.modules[name], self._launchers[name], None)
            if kind is not None:  # else the module is being imported
                self._launchers.pop(name, None)  # another thread may have been first
                kind.run = self._doubting(kind.run)

    def _doubting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            given = tree_leaves((args, kwargs))
            self._doubt([getattr(it, "base", it) for it in given])  # a tensor, or what describes or reinterprets one
            return run(kernel, *args, **kwargs)

        return call

    def _doubting_captured(self, replay: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(replay)
        def call(*args: Any, **kwargs: Any) -> Any:
            for key in self._captured & self._shadows.keys():
                self._shadows[key].is_known = False
            return replay(*args, **kwargs)

        return call

    def _doubt(self, tensors: Any) -> None:
        """Take what the host has of tensors for a guess."""
        for it in filter(_is_on_card, tree_leaves(tensors)):
            if (shadow := self._shadow(it)) is not None:
                shadow.is_known = False

    def _in_python(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the Python code of an operator that is not torch's; kernels of its own may write what it gives."""
        with self:
            outs = func.redispatch(ON_CARD, *args, **kwargs)
        self._doubt((outs, _mutated(func, args, kwargs)))
        return outs

    def _have_no_shadow(self, arguments: Sequence[Any]) -> bool:
        """Return whether the tensors among arguments lie on cards, at least one, without a shadow."""
        num_tensors = 0
        for one in arguments:
            for it in one if isinstance(one, (list, tuple)) else (one,):
                if type(it) in PLAIN:
                    if it.device.type != "cuda" or it.layout is not torch.strided or _key(it) in self._shadows:
                        return False
                    num_tensors += 1
                elif isinstance(it, torch.Tensor):
                    return False
        return num_tensors > 0

    def _without_shadow(self, func: Any, outs: Any, written: Sequence[Any] = ()) -> Any:
        """Return what an operator gave, of which nothing is known, nor of what it has written to."""
        if not _is_view(func):
            for it in (*(tree_leaves(outs) if isinstance(outs, (list, tuple)) else (outs,)), *written):
                if _is_on_card(it):
                    self._forget(it)
        if func in SCALES and outs.is_floating_point() and _is_small(outs):
            self._set(outs, torch.ones((), dtype=outs.dtype), is_known=False)
        return outs

    def _on_both(self, func: Any, args: Any, kwargs: Any, on_card: list[torch.Tensor]) -> Any:
        """Run an operator on the card and on the host, and return what the card gave with the host's values."""
        if _is_view(func):
            if func is aten.lift_fresh.default and on_card:
                self._adopt(args[0])
            return func(*args, **kwargs)
        has_values = func not in UNDEFINED and torch.Tag.nondeterministic_seeded not in func.tags
        is_known = has_values and all(map(self._is_known, on_card))
        if func in OVERWRITES and _is_on_card(args[0]):
            is_known = all(self._is_known(it) for it in on_card if it is not args[0])
            num_bytes = args[0].numel() * args[0].element_size()
            is_known &= num_bytes == _storage_bytes(args[0]) or self._is_known(args[0])
        elif on_card and not any(map(self._shadow, on_card)):
            return self._on_card_alone(func, args, kwargs)
        if func is aten.copy_.default and not _is_on_card(args[0]):  # to the host: its values come last
            self._on_card(func, args, kwargs, [], is_known)
            return self._on_host(func, args, kwargs)
        counts, are_known = self._selected(func, args) or ([], is_known)  # before a mask may be overwritten
        try:
            expected = self._on_host(func, args, kwargs)
        except Exception:  # an operator of cards alone, or values that it cannot have
            return self._on_card_alone(func, args, kwargs)
        if func in COUNTS:
            counts, are_known = COUNTS[func](expected, args), self._is_known(args[0])
        real = self._on_card(func, args, kwargs, counts, are_known)
        self._keep(real, expected, _mutated(func, args, kwargs), is_known)
        outs = [it for it in tree_leaves(real) if isinstance(it, torch.Tensor)]
        return real if outs else expected

    def _on_card_alone(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator without the host: what it writes has no shadow any more."""
        real = self._on_card(func, args, kwargs, *(self._selected(func, args) or ([], False)))
        return self._without_shadow(func, real, _mutated(func, args, kwargs))

    def _on_card(self, func: Any, args: Any, kwargs: Any, counts: Sequence[int], are_known: bool) -> Any:
        """Run an operator on the card, which reads these counts, and its arguments, while it runs.

        One that checks its arguments, as normal() does, and raises since it has read zero, is told that they pass.
        """
        running = self._running
        running.call, running.has_guessed = (func, args, kwargs), False
        try:
            with _answering(counts, are_known):
                return func(*args, **kwargs)
        except RuntimeError as error:
            may_be_false = running.has_guessed and func.namespace == "aten"
            if not may_be_false or isinstance(error, torch.OutOfMemoryError):
                raise
        finally:
            running.call = None
        with _answering([1] * MOST_CHECKS, are_known):
            return func(*args, **kwargs)

    def _fill(self, to: int, address: int, size: int) -> int:
        """Write to the host what the running operator reads of an argument, unless that is one that it writes to."""
        if self._running.call is None:
            return UNKNOWN
        func, args, kwargs = self._running.call
        written = {_key(it) for it in _mutated(func, args, kwargs)}
        for it in filter(_is_on_card, tree_leaves((args, kwargs))):
            shadow = self._shadow(it)
            offset = address - it.data_ptr() + it.storage_offset() * it.element_size()
            if shadow is None or _key(it) in written:
                continue
            if 0 <= offset <= shadow.storage.nbytes() - size:
                ctypes.memmove(to, shadow.storage.data_ptr() + offset, size)
                self._running.has_guessed |= not shadow.is_known
                return KNOWN if shadow.is_known else GUESSED
        self._running.has_guessed = True
        return UNKNOWN

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        mirrored, named = tree_map(self._mirror, (args, kwargs))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        with torch.random.fork_rng(devices=()) if is_random else nullcontext():
            if func in PRODUCTS and args[-1].dtype in HALF:
                widened = tree_map_only(torch.Tensor, torch.Tensor.float, mirrored)
                return func(*widened, **named).to(args[-1].dtype)
            return func(*mirrored, **named)

    def _selected(self, func: Any, args: Any) -> tuple[list[int], bool] | None:
        """Return how many elements an operator's masks select, and whether that is known; None without small masks."""
        if func not in MASKED:
            return None
        if func is aten._nested_tensor_from_mask.default:  # which reads if it may, and the sizes of all rows at once
            (tensor, mask), is_unchecked = args[:2], args[2:] == (False,)
            if not _is_small(mask):
                return None
            lengths = self._mirror(mask).sum(1).tolist()
            sizes = [size for length in lengths for size in (length, tensor.shape[2])]
            return sizes if is_unchecked else [1, *sizes], self._is_known(mask)
        if func is aten.masked_select.default:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
            masks = [args[1].expand(shape)]
        else:
            masks = [it for it in args[1] if _is_on_card(it) and it.dtype in (torch.bool, torch.uint8)]
        if not masks or not all(map(_is_small, masks)):
            return None
        return [int(self._mirror(it).count_nonzero()) for it in masks], all(map(self._is_known, masks))

    def _keep(self, real: Any, expected: Any, mutated: Sequence[torch.Tensor], is_known: bool) -> None:
        """Give the outputs the host's values: on the card their shadows, on the host themselves."""
        for out, value in zip(tree_leaves(real), tree_leaves(expected), strict=False):
            if not isinstance(out, torch.Tensor) or not isinstance(value, torch.Tensor):
                continue
            if out.is_nested or out.shape != value.shape:
                continue
            if out.device.type != "cuda":
                _write(out, value)
            elif _is_small(out):
                self._set(out, value, is_known)
        for it in mutated:  # which an operator need not return: its values were computed in place
            if (shadow := self._shadow(it)) is not None:
                shadow.is_known = is_known

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """All ranks do the same: what a rank receives of another is what it sent; a sum is guessed as its own part.

        That of a single rank is its part; a factor of ReduceOp.PREMUL_SUM is not seen.
        """
        done, name = func(*args, **kwargs), func.overloadpacket.__name__
        if any(word in name for word in RECEIVE_NOTHING):
            return done
        first, second, returned = ([it for it in tree_leaves(one) if _is_on_card(it)] for one in (*args[:2], done))
        sent, received = (second or first, first) if func.namespace == "c10d" else (first, returned)
        sent = sent * len(received) if len(sent) == 1 else sent
        is_whole = "gather" in name or "broadcast" in name or _num_ranks(_given(func, args, kwargs)) == 1
        if len(sent) == len(received) and (is_whole or "allreduce" in name or "all_reduce" in name):
            for own, out in zip(sent, received, strict=True):
                self._receive(out, own, is_whole)
        else:
            for it in received:
                self._forget(it)
        return done

    def _receive(self, out: torch.Tensor, own: torch.Tensor, is_whole: bool) -> None:
        """Take what a rank has sent for what it receives of each rank; it is known if that is all of it."""
        shadow, num_parts = self._shadow(own), out.numel() // max(1, own.numel())
        if shadow is None or not _is_small(out) or num_parts * own.numel() != out.numel():
            self._forget(out)
        else:
            received = self._mirror(own).reshape(-1).repeat(num_parts).view(out.shape)
            self._set(out, received, is_whole and shadow.is_known)

    def _adopt(self, it: torch.Tensor) -> None:
        """Take over what torch.tensor() has copied to the card, which a dispatch mode does not see."""
        content = torch.empty(_storage_bytes(it), dtype=torch.uint8)
        if _card.card_known(ctypes.c_void_p(content.data_ptr()), ctypes.c_void_p(it.data_ptr()), content.nbytes):
            self._add(it, content.untyped_storage(), is_known=True)

    def _add(self, it: torch.Tensor, content: torch.UntypedStorage, *, is_known: bool) -> Shadow:
        weak = StorageWeakRef(it.untyped_storage())  # type: ignore[no-untyped-call]
        shadow = self._shadows[_key(it)] = Shadow(weak, content, is_known)
        self._num_bytes += content.nbytes()
        return shadow

    def _make_room(self) -> None:
        """Remove shadows if there are too many: of freed storages, then those that are not known, then all."""
        if self._num_bytes < MOST_BYTES and len(self._shadows) < MOST_SHADOWS:
            return
        may_go: Callable[[Shadow], bool]
        for may_go in (_is_freed, lambda one: not one.is_known, lambda one: True):
            self._shadows = {key: one for key, one in self._shadows.items() if not may_go(one)}
            self._num_bytes = sum(one.storage.nbytes() for one in self._shadows.values())
            if self._num_bytes <= MOST_BYTES / 2 and len(self._shadows) <= MOST_SHADOWS / 2:
                return

    def _forget(self, it: torch.Tensor) -> None:
        self._shadows.pop(_key(it), None)

    def _set(self, it: torch.Tensor, value: torch.Tensor, is_known: bool) -> None:
        """Write values to the shadow of a tensor."""
        _write(self._mirror(it), value)
        self._shadows[_key(it)].is_known = is_known

    def _shadow(self, it: torch.Tensor) -> Shadow | None:
        found = self._shadows.get(_key(it))
        return found if found is not None and found.storage.nbytes() == _storage_bytes(it) else None

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
            zeros = torch.zeros(_storage_bytes(it), dtype=torch.uint8)
            shadow = self._add(it, zeros.untyped_storage(), is_known=False)
        mirror = torch.empty(0, dtype=it.dtype)
        return mirror.set_(shadow.storage, it.storage_offset(), it.size(), it.stride())


@contextmanager
def _answering(counts: Sequence[int], are_known: bool) -> Iterator[None]:
    """Answer what an operator reads from the card while it runs: these numbers first; unknown reads are reported."""
    numbers = (ctypes.c_int64 * len(counts))(*counts)
    _card.card_answer(numbers, ctypes.c_size_t(len(counts)))
    _card.card_reads_are_known(int(are_known))
    try:
        yield
    finally:
        _card.card_answer(None, ctypes.c_size_t(0))
        _card.card_reads_are_known(0)


def _write(to: torch.Tensor, value: torch.Tensor) -> None:
    """Copy values, unless they were computed in place or several elements share a place."""
    if _key(to) != _key(value) and 0 not in to.stride():
        to.copy_(value)


def _is_freed(shadow: Shadow) -> bool:
    return bool(shadow.of.expired())  # type: ignore[no-untyped-call]


def _mutated(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors on the card that an operator writes to and was given."""
    if not func._schema.is_mutable:
        return []
    given = _given(func, args, kwargs)
    written = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return [it for it in tree_leaves([given.get(name) for name in written]) if _is_on_card(it)]


def _given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments that an operator was given by their names."""
    return {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **kwargs}


def _num_ranks(given: dict[str, Any]) -> int:
    """Return the number of ranks that exchange something, by the arguments of the operator."""
    if (boxed := given.get("process_group")) is not None:
        return int(torch.distributed.ProcessGroup.unbox(boxed).size())
    group = given["group_name"]
    if isinstance(group, str):  # else it is the group itself, as since torch 2.13
        group = torch.distributed.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type, attr-defined]
    return int(group.size())


Values().__enter__()  # type: ignore[no-untyped-call]
