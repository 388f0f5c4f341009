"""The exception for invalid input, and short forms of other errors; none contains a URL's password."""

from pipeline.base.passwords import without_passwords


class InvalidInputError(ValueError):
    """Invalid user input; the message states the rule, the invalid value and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(without_passwords(message))


class NothingMeasuredError(RuntimeError):
    """A search ended before a configuration was measured."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return without_passwords((str(error).splitlines() or [type(error).__name__])[0])


def origin(error: BaseException) -> BaseException:
    """Return the error that was raised first, from which the others follow."""
    return error if error.__cause__ is None else origin(error.__cause__)


def printable(text: str) -> str:
    """Return text that any terminal shows, without halves of characters and what moves its cursor."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
