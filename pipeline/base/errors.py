"""The exception for invalid input, and the first line of an error message."""


class InvalidInputError(ValueError):
    """Invalid user input; the message states the rule, the invalid value and the remedy."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
