"""The exception for invalid input, what was meant, and short forms of other errors, without passwords."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_IN_ADDRESS = re.compile(r"(://[^:/?#@\s]*):\S+@")
"""user:password@ of a URL; the password may hold any character, for not every driver wants it encoded."""
_IN_OPTIONS = re.compile(r"\b((?:ssl)?passw(?:or)?d=)[^&\s]+", re.IGNORECASE)
"""An option such as ?password=..., which PostgreSQL's drivers take too."""


class InvalidInputError(ValueError):
    """Invalid user input; the message states the rule, the invalid value and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(without_passwords(message))


class NothingMeasuredError(RuntimeError):
    """A search ended before a configuration was measured."""


def close_to(name: str, names: Iterable[str], most: int = 2, likeness: float = 0.6) -> list[str]:
    """Return those of the names that are so like a name that it may have been meant, the closest first."""
    return difflib.get_close_matches(name, list(names), n=most, cutoff=likeness)


def did_you_mean(close: Sequence[str], otherwise: str) -> str:
    """Return the question that ends a message about an unknown name; `otherwise` where no name is close."""
    return f"did you mean {' or '.join(close)}?" if close else otherwise


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ, or that one of both lacks, in alphabetical order."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return without_passwords((str(error).splitlines() or [type(error).__name__])[0])


def origin(error: BaseException) -> BaseException:
    """Return the error that was raised first, from which the others follow."""
    return error if error.__cause__ is None else origin(error.__cause__)


def printable(text: str) -> str:
    """Return text that any terminal shows, without halves of characters and what moves its cursor."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def has_password(text: str) -> bool:
    """Return whether a text contains a URL with a password."""
    return without_passwords(text) != text


def without_passwords(text: str) -> str:
    """Return a text without the passwords of the URLs in it."""
    return _IN_OPTIONS.sub(r"\1***", _IN_ADDRESS.sub(r"\1@", text))
