"""Values by their keys: in lists, and added up."""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in their order."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def summed(pairs: Iterable[tuple[Key, int]]) -> Counter[Key]:
    """Return the sum of the values of each key."""
    found = Counter[Key]()
    for key, value in pairs:
        found[key] += value
    return found
