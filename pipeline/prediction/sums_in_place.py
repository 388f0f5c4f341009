"""Sums that torch computes in place on plain tensors, but not on fake ones (areAnyTensorSubclassLike).

They are those of a bias in linear (aten/src/ATen/native/Linear.cpp) and of a mask in math attention (attention.cpp).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_in_place: ContextVar[bool] = ContextVar("in_place", default=False)


@contextmanager
def adding_in_place() -> Iterator[None]:
    """Let every sum inside this context count as computed in place."""
    token = _in_place.set(True)
    try:
        yield
    finally:
        _in_place.reset(token)


def adds_in_place() -> bool:
    """Whether a sum now is one that torch computes in place."""
    return _in_place.get()
