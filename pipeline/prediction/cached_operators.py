"""Fake tensors that remember what an operator makes of arguments of one form, and then make it without the operator.

torch's FakeTensorMode has such a memory, too. Asking this one, which knows of no symbolic shapes, takes a fraction of
the time, and most of a prediction is asking it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments and results that are all that they say."""
UNSTEADY = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""What is said of operators whose results or arguments take another form from call to call."""


class UnknownError(Exception):
    """Something cannot be remembered."""


class Made(NamedTuple):
    """A tensor that an operator makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    """Where it begins in its storage."""
    source: int | None
    """Number of the argument whose storage it is in; None where it has one of its own."""
    attributes: Mapping[str, Any]
    """Python's, of a fake tensor."""


class Returned(NamedTuple):
    """An argument that an operator returns as it is."""

    number: int


class Plain(NamedTuple):
    """A result without a tensor."""

    value: object


class Several(NamedTuple):
    """Results that come together."""

    kind: type[tuple[Any, ...]] | type[list[Any]]
    parts: "tuple[Result, ...]"


Result = Made | Returned | Plain | Several

Call = tuple[Any, ...]

_memory: dict[Call | None, Result | None] = {}
"""By operator and the form of its arguments; None where the result cannot be remembered."""


def forget() -> None:
    """Forget all that is remembered."""
    _memory.clear()


class CachedFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode for tensors of known shapes that runs an operator once for arguments of one form."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own memory would only be asked for what this one does not know

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that nothing is compiled here, which would cost as much as the remembering."""
        return False

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what `func` makes of its arguments, for a dispatch mode above this one: what is known, at once."""
        known = _memory.get(_call(func, args, kwargs))
        if known is None:
            return func(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            return self._make(known, args)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return what `func` makes of its arguments: from memory if it can be, else by running it."""
        kwargs = kwargs or {}
        call = _call(func, args, kwargs)
        known = _memory.get(call)
        if known is not None:
            return self._make(known, args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if call is not None and call not in _memory:
            has_changed_an_argument = _call(func, args, kwargs) != call
            _memory[call] = None if has_changed_an_argument else self._remembered(func, args, result)
        return result

    def _make(self, result: Result, args: Sequence[Any]) -> Any:
        if isinstance(result, Made):
            return self._tensor(result, args)
        if isinstance(result, Returned):
            return args[result.number]
        if isinstance(result, Several):
            return result.kind([self._make(part, args) for part in result.parts])
        return result.value

    def _tensor(self, made: Made, args: Sequence[Any]) -> FakeTensor:
        """Return a new tensor, without asking FakeTensor's constructor, which takes as long as all of the rest."""
        tensor = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        if made.source is not None:
            tensor.set_(args[made.source].untyped_storage(), made.offset, made.shape, made.stride)
        fake = Tensor._make_subclass(
            FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=made.device
        )
        fake.__dict__.update(made.attributes, fake_mode=self)
        return fake

    def _remembered(self, func: Any, args: Sequence[Any], result: Any) -> Result | None:
        """Return how to make `result` again; None where that is not known."""
        try:
            return None if any(tag in func.tags for tag in UNSTEADY) else self._taken_apart(args, result)
        except UnknownError:
            return None

    def _taken_apart(self, args: Sequence[Any], result: Any) -> Result:
        if isinstance(result, tuple | list):
            parts = tuple(self._taken_apart(args, part) for part in result)
            return Several(list if isinstance(result, list) else tuple, parts)
        if isinstance(result, PLAIN):
            return Plain(result)
        returned = next((number for number, arg in enumerate(args) if arg is result), None)
        return self._made(args, result) if returned is None else Returned(returned)

    def _made(self, args: Sequence[Any], result: Any) -> Made:
        """Return how to make `result` again, if that is alike in all that matters."""
        if not _is_simple(result):
            raise UnknownError
        storage = result.untyped_storage()
        sources = (
            number
            for number, arg in enumerate(args)
            if isinstance(arg, Tensor) and arg.untyped_storage()._cdata == storage._cdata
        )
        made = Made(
            shape=tuple(result.shape),
            stride=result.stride(),
            dtype=result.dtype,
            device=result.fake_device,
            offset=int(result.storage_offset()),
            source=next(sources, None),
            attributes={name: value for name, value in result.__dict__.items() if name != "fake_mode"},
        )
        again = self._tensor(made, args)
        if _all_of(again) != _all_of(result):
            raise UnknownError
        return made


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """Return an operator and the form of its arguments; None where there is more to them."""
    try:
        forms = (*map(_form, args), *map(_option, kwargs.items()))
    except UnknownError:
        return None
    return func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), forms


def _option(pair: tuple[str, Any]) -> object:
    """Return what _form() does, of what is given by name; of a tensor there (`out`) the result may be a part."""
    name, value = pair
    if any(isinstance(part, Tensor) for part in (value if isinstance(value, tuple | list) else (value,))):
        raise UnknownError
    return name, _form(value)


def _form(arg: Any) -> object:
    """Return what an operator's result depends on, of an argument whose values are unknown."""
    if isinstance(arg, Tensor):
        if not _is_simple(arg):
            raise UnknownError
        return arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.fake_device, arg.requires_grad
    if isinstance(arg, tuple | list):
        return type(arg), *map(_form, arg)
    if isinstance(arg, PLAIN):
        return type(arg), arg  # 1 equals 1.0 and True, and makes another result
    raise UnknownError


def _is_simple(tensor: Any) -> TypeGuard[FakeTensor]:
    """Whether there is nothing about a tensor but its form: no known value, sparsity or pending conjugation."""
    return (
        type(tensor) is FakeTensor
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _all_of(tensor: FakeTensor) -> tuple[object, ...]:
    return _form(tensor), tensor.untyped_storage().nbytes(), torch._C._dispatch_key_set(tensor)
