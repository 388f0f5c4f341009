"""Sums that torch computes in place on plain tensors, but not on fake ones or under a dispatch mode.

They are those of a bias in linear (aten/src/ATen/native/Linear.cpp) and of a mask in math attention (attention.cpp),
which ask areAnyTensorSubclassLike (TensorSubclassLikeUtils.h).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pipeline.memory.recorder import LifetimeRecorder

_in_place: ContextVar[bool] = ContextVar("in_place", default=False)


@contextmanager
def adding_in_place() -> Iterator[None]:
    """Let every sum inside this context count as computed in place, unless the run itself has a dispatch mode."""
    token = _in_place.set(not _has_own_mode())
    try:
        yield
    finally:
        _in_place.reset(token)


def adds_in_place() -> bool:
    """Whether a sum now is one that torch computes in place."""
    return _in_place.get()


def _has_own_mode() -> bool:
    """Whether a dispatch mode is active that would be in a run on the device too."""
    return not all(isinstance(mode, LifetimeRecorder | FakeTensorMode) for mode in _get_current_dispatch_mode_stack())
