"""The exception for invalid input, and the first line of an error message; neither contains a URL's password."""

from pipeline.base.passwords import without_passwords


class InvalidInputError(ValueError):
    """Invalid user input; the message states the rule, the invalid value and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(without_passwords(message))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return without_passwords((str(error).splitlines() or [type(error).__name__])[0])
