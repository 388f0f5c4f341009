"""A FakeTensorMode with a faster cache of operators' results.

The key is an operator and the form of its arguments: shape, strides, storage offset, dtype and device of each tensor,
and the value of each other argument. torch's FakeTensorMode has such a cache too. A look-up in this one, which has no
symbolic shapes, takes a fraction of its time, and look-ups are most of the time of a prediction.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pipeline.memory.work_counter import Memo
from pipeline.prediction.fake.measured_operators import with_workspace

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments and results that are cached by value."""
UNCACHED_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Tags of operators whose results or arguments vary from call to call."""


class UncacheableError(Exception):
    """An argument or a result that cannot be cached."""


class NewTensor(NamedTuple):
    """A result that is a new tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    """Offset in its storage, in elements."""
    source: int | None
    """Index of the argument whose storage it shares; None if it has its own."""
    attributes: Mapping[str, Any]
    """Python attributes of the fake tensor."""


class SameTensor(NamedTuple):
    """A result that is one of the arguments."""

    argument: int


class Value(NamedTuple):
    """A result without a tensor."""

    value: object


class Several(NamedTuple):
    """A tuple or a list of results."""

    kind: type[tuple[Any, ...]] | type[list[Any]]
    parts: "tuple[Result, ...]"


Result = NewTensor | SameTensor | Value | Several

Call = tuple[Any, ...]


class Cached(NamedTuple):
    """What is known of all calls of one form."""

    result: Result
    memo: Memo
    """For a recorder of these calls."""


_cache: dict[Call | None, Cached | None] = {}
"""By operator and the form of its arguments; None if the result cannot be cached."""


def clear_cache() -> None:
    """Remove all cached results."""
    _cache.clear()


class CachedFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode for tensors of static shapes that runs an operator once for each form of its arguments."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own cache would only see what is not in this one

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and skipping dynamo costs as much as a look-up."""
        return False

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Memo]:
        """Return the result of `func` for a dispatch mode above this one, and its memo: from the cache if possible."""
        cached = _cache.get(_call(func, args, kwargs))
        if cached is None:
            return func(*args, **kwargs), {}
        with torch._C._DisableTorchDispatch():
            return self._make(cached.result, args), cached.memo

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the result of `func`, from the cache if possible."""
        kwargs = kwargs or {}
        call = _call(func, args, kwargs)
        cached = _cache.get(call)
        if cached is not None:
            return self._make(cached.result, args)
        result = with_workspace(func, args, super().__torch_dispatch__(func, types, args, kwargs))
        if call is not None and call not in _cache:
            has_changed_an_argument = _call(func, args, kwargs) != call
            cacheable = None if has_changed_an_argument else self._cacheable(func, args, result)
            _cache[call] = None if cacheable is None else Cached(cacheable, {})
        return result

    def _make(self, result: Result, args: Sequence[Any]) -> Any:
        if isinstance(result, NewTensor):
            return self._tensor(result, args)
        if isinstance(result, SameTensor):
            return args[result.argument]
        if isinstance(result, Several):
            return result.kind([self._make(part, args) for part in result.parts])
        return result.value

    def _tensor(self, made: NewTensor, args: Sequence[Any]) -> FakeTensor:
        """Return a new tensor, without FakeTensor's constructor, which takes as long as all of the rest."""
        tensor = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        if made.source is not None:
            tensor.set_(args[made.source].untyped_storage(), made.offset, made.shape, made.stride)
        fake = Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=made.device
        )
        fake.__dict__.update(made.attributes, fake_mode=self)
        return fake

    def _cacheable(self, func: Any, args: Sequence[Any], result: Any) -> Result | None:
        """Return the cache entry of `result`; None if it cannot be cached."""
        try:
            return None if any(tag in func.tags for tag in UNCACHED_TAGS) else self._entry(args, result)
        except UncacheableError:
            return None

    def _entry(self, args: Sequence[Any], result: Any) -> Result:
        if isinstance(result, tuple | list):
            parts = tuple(self._entry(args, part) for part in result)
            return Several(list if isinstance(result, list) else tuple, parts)
        if isinstance(result, PLAIN):
            return Value(result)
        returned = next((number for number, arg in enumerate(args) if arg is result), None)
        return self._new_tensor(args, result) if returned is None else SameTensor(returned)

    def _new_tensor(self, args: Sequence[Any], result: Any) -> NewTensor:
        """Return the cache entry of a tensor, after a check that a tensor made from it is identical."""
        if not _is_simple(result):
            raise UncacheableError
        storage = result.untyped_storage()
        sources = (
            number
            for number, arg in enumerate(args)
            if isinstance(arg, Tensor) and arg.untyped_storage()._cdata == storage._cdata
        )
        made = NewTensor(
            shape=tuple(result.shape),
            stride=result.stride(),
            dtype=result.dtype,
            device=result.fake_device,
            offset=int(result.storage_offset()),
            source=next(sources, None),
            attributes={name: value for name, value in result.__dict__.items() if name != "fake_mode"},
        )
        again = self._tensor(made, args)
        if _full_form(again) != _full_form(result):
            raise UncacheableError
        return made


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """Return the cache key: an operator and the form of its arguments; None if the call cannot be cached."""
    try:
        forms = (*map(_form, args), *map(_option, kwargs.items()))
    except UncacheableError:
        return None
    return func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), forms


def _option(pair: tuple[str, Any]) -> object:
    """Return the form of a keyword argument; a tensor there (`out`) may be the result."""
    name, value = pair
    if any(isinstance(part, Tensor) for part in (value if isinstance(value, tuple | list) else (value,))):
        raise UncacheableError
    return name, _form(value)


def _form(arg: Any) -> object:
    """Return the properties of an argument on which the form of an operator's result may depend."""
    if isinstance(arg, Tensor):
        if not _is_simple(arg):
            raise UncacheableError
        return arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.fake_device, arg.requires_grad
    if isinstance(arg, tuple | list):
        return type(arg), *map(_form, arg)
    if isinstance(arg, PLAIN):
        return type(arg), arg  # 1 equals 1.0 and True, and makes another result
    raise UncacheableError


def _is_simple(tensor: Any) -> TypeGuard[FakeTensor]:
    """Whether a tensor has no known value, sparsity or pending conjugation."""
    return (
        type(tensor) is FakeTensor
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _full_form(tensor: FakeTensor) -> tuple[object, ...]:
    return _form(tensor), tensor.untyped_storage().nbytes(), torch._C._dispatch_key_set(tensor)
