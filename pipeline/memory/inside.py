"""What an operator allocates inside its kernel besides its results, in the order in which it does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory that a kernel takes for itself."""

    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Inside:
    """The buffers of one call of an operator.

    A buffer is allocated where it first occurs and freed where it occurs again; one that occurs once is kept.
    """

    before: tuple[Buffer, ...] = ()
    """What happens before the results are allocated."""
    after: tuple[Buffer, ...] = ()
    """What happens after it."""
    result_bytes: int | None = None
    """The bytes of the result's storage, if it has more than its shape needs."""


NOTHING = Inside()

InsideOf = Callable[[Any, tuple[Any, ...]], Inside]
"""(operator, its arguments) -> its buffers."""


def nothing_inside(*_: object) -> Inside:
    """Return no buffers, for any operator."""
    return NOTHING
