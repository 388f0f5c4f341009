"""Sizes: memory and budgets such as 8GiB, 8GB, 512MiB or 80% in bytes, those that divide a batch, and their text."""

import re

from pipeline.base.errors import InvalidInputError

MIB = 2**20
UNIT_BYTES = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}
FORM = re.compile(rf"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>{'|'.join(UNIT_BYTES)}|%)")


def mib(num_bytes: int | None) -> float | None:
    """Return a size in MiB; None if it is not known."""
    return None if num_bytes is None else num_bytes / MIB


def in_four_digits(value: float) -> str:
    """Return a number in four digits, or all that stand before the point."""
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, the smallest first."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return the powers of two up to a number, the smallest first."""
    return tuple(2**power for power in range(most.bit_length()))


def parse_budget(text: str, total_bytes: int, what: str = "a budget") -> int:
    """Return the budget in bytes; a percentage is of `total_bytes`, the device's memory; messages call it `what`.

    Raises:
        InvalidInputError: its form is invalid, it is zero, or it exceeds the device's memory.

    """
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise InvalidInputError(
            f"{what} is a number with a unit ({', '.join(UNIT_BYTES)}) or a percentage of the device, not {text!r}; "
            "write for example 8GiB, 512MiB or 80%"
        )
    number, unit = float(match["number"]), match["unit"]
    budget = int(number * total_bytes / 100 if unit == "%" else number * UNIT_BYTES[unit])
    if budget <= 0:
        raise InvalidInputError(f"{what} must be more than zero, not {text!r}; write for example 8GiB")
    if budget > total_bytes:
        raise InvalidInputError(
            f"{what} cannot be more than the device's memory: {text!r} is {budget / 2**30:.1f} GiB of "
            f"{total_bytes / 2**30:.1f} GiB; write at most 100%, or describe a larger card in --gpu"
        )
    return budget


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 1.2GiB.

    Raises:
        InvalidInputError: its form is invalid.

    """
    match = FORM.fullmatch(text.strip())
    if match is None or match["unit"] == "%":
        raise InvalidInputError(
            f"a size is a number with a unit ({', '.join(UNIT_BYTES)}), not {text!r}; write for example 1.2GiB"
        )
    return int(float(match["number"]) * UNIT_BYTES[match["unit"]])


def allowed_bytes(budget: str | None, other_processes: str | None, memory_bytes: int, context_bytes: int) -> int:
    """Return what torch may use of a device: the budget, or what its context and other processes leave.

    A percentage is of the device's memory, and no more than its context leaves.

    Raises:
        InvalidInputError: one of both cannot be read, both are given, or the other processes leave nothing.

    """
    if budget is not None and other_processes is not None:
        raise InvalidInputError(
            f"budget ({budget}) is what the training may use, and other_processes ({other_processes}) what it may not; "
            "give one of them"
        )
    free_bytes = memory_bytes - context_bytes
    if budget is not None:
        budget_bytes = parse_budget(budget, memory_bytes)
        return min(budget_bytes, free_bytes) if "%" in budget else budget_bytes
    held_bytes = parse_size(other_processes) if other_processes is not None else 0
    if held_bytes >= free_bytes:
        raise InvalidInputError(
            f"other processes must leave memory of a device with {free_bytes / 2**30:.1f} GiB, and other_processes is "
            f"{other_processes}; write what nvidia-smi shows as used before the training starts"
        )
    return free_bytes - held_bytes
