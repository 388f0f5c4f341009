"""A FakeTensorMode with a faster cache of operators' results.

The key is an operator and the form of its arguments: shape, strides, storage offset, dtype and device of each tensor,
and the value of each other argument. torch's FakeTensorMode has such a cache too. A look-up in this one, which has no
symbolic shapes, takes a fraction of its time, and look-ups are most of the time of a prediction.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pipeline.memory.work_counter import Memo
from pipeline.prediction.fake.cpu_buffers import with_workspace

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments and results that are cached by value."""
UNCACHED_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Tags of operators whose results or arguments vary from call to call."""


class UncacheableError(Exception):
    """An argument or a result that cannot be cached."""


Call = tuple[Any, ...]
Make = Callable[["CachedFakeTensorMode", Sequence[Any]], Any]
"""Makes the result of a call on fake tensors of a mode, from its positional arguments."""

_cache: dict[Call | None, tuple[Make, Memo] | None] = {}
"""What makes results and what recorders note, by operator and form of its arguments; None: it cannot be cached."""


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
        make, memo = cached
        with torch._C._DisableTorchDispatch():
            return make(self, args), memo

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the result of `func`, from the cache if possible."""
        kwargs = kwargs or {}
        call = _call(func, args, kwargs)
        cached = _cache.get(call)
        if cached is not None:
            return cached[0](self, args)
        result = with_workspace(func, args, super().__torch_dispatch__(func, types, args, kwargs))
        if call is not None and call not in _cache:
            has_changed_an_argument = _call(func, args, kwargs) != call
            _cache[call] = None if has_changed_an_argument else self._entry(func, args, result)
        return result

    def _entry(self, func: Any, args: Sequence[Any], result: Any) -> tuple[Make, Memo] | None:
        """Return the cache entry of `result`; None if it cannot be cached."""
        try:
            return None if any(tag in func.tags for tag in UNCACHED_TAGS) else (self._maker(args, result), {})
        except UncacheableError:
            return None

    def _maker(self, args: Sequence[Any], result: Any) -> Make:
        """Return what makes a result like this one, from arguments like these."""
        if isinstance(result, tuple | list):
            makers = [self._maker(args, part) for part in result]
            kind = list if isinstance(result, list) else tuple
            return lambda mode, own: kind([make(mode, own) for make in makers])
        if isinstance(result, PLAIN):
            return lambda mode, own: result
        returned = next((number for number, arg in enumerate(args) if arg is result), None)
        if returned is not None:
            return lambda mode, own: own[returned]
        if not _is_simple(result):
            raise UncacheableError
        make = _new_tensor(args, result)
        if _full_form(make(self, args)) != _full_form(result):
            raise UncacheableError
        return make


def _new_tensor(args: Sequence[Any], result: FakeTensor) -> Make:
    """Return what makes a tensor like `result`, which shares its storage with one of these arguments or has its own."""
    shape, stride, dtype, device = tuple(result.shape), result.stride(), result.dtype, result.fake_device
    offset = int(result.storage_offset())
    storage = result.untyped_storage()._cdata
    source = next(
        (n for n, arg in enumerate(args) if isinstance(arg, Tensor) and arg.untyped_storage()._cdata == storage), None
    )
    attributes = {name: value for name, value in result.__dict__.items() if name != "fake_mode"}

    def make(mode: CachedFakeTensorMode, own: Sequence[Any]) -> FakeTensor:
        """Return a new tensor, without FakeTensor's constructor, which takes as long as all of the rest."""
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if source is not None:
            tensor.set_(own[source].untyped_storage(), offset, shape, stride)
        fake = Tensor._make_subclass(FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=device)
        fake.__dict__.update(attributes, fake_mode=mode)
        return fake

    return make


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
