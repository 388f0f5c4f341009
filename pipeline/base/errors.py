"""The error of invalid input, and how errors are shortened."""


class InvalidInputError(ValueError):
    """What the user asked for cannot be done; the message states the rule, the value and the remedy."""


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
