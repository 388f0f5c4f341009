"""The memory that a command needed when it was last accepted: a small file of JSON, kept beside the code in git."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import write_atomically
from pipeline.prediction.commands.simulation import ProcessMemory, Simulation

REMEDY = "--update writes it from what the command needs now"
CONDITIONS = ("CUDA", "allocator", "attention")
"""What a simulation rests on beside its card and its torch, as Simulation.assumptions names it."""


@dataclass(frozen=True, kw_only=True)
class LineMemory:
    """The memory of one source line and purpose at the peak."""

    line: str
    """As file:line."""
    code: str
    """The text of the line, by which it is found again when others above it have moved it."""
    purpose: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryBaseline:
    """What a command needed of a card."""

    card: str
    torch: str
    """Version of torch."""
    conditions: Mapping[str, str]
    """What its memory depends on beside these."""
    peak_allocated_bytes: int
    """The largest of any process, as the following."""
    peak_reserved_bytes: int
    lines: tuple[LineMemory, ...]
    """What lives at the peak of the process that uses most of its card, the largest first."""


def baseline_of(simulation: Simulation, command: str) -> MemoryBaseline:
    """Return what a simulation found, of which at least one process must have used a card."""
    largest = simulation.largest
    assert largest is not None
    return MemoryBaseline(
        card=simulation.card,
        torch=simulation.assumptions["torch"],
        conditions=_conditions(simulation, command),
        peak_allocated_bytes=max(process.peak_allocated_bytes for process in simulation.processes),
        peak_reserved_bytes=max(process.peak_reserved_bytes for process in simulation.processes),
        lines=lines_of(largest),
    )


def lines_of(process: ProcessMemory) -> tuple[LineMemory, ...]:
    """Return the memory of a process at its peak by source line and purpose, the largest first."""
    found = (
        LineMemory(
            line=one.module, code=process.code.get(one.module, ""), purpose=one.category, num_bytes=one.num_bytes
        )
        for one in process.lines
    )
    return tuple(sorted(found, key=lambda one: (-one.num_bytes, one.line, one.purpose)))


def _conditions(simulation: Simulation, command: str) -> dict[str, str]:
    return {
        "command": command,
        "cards": str(simulation.num_cards),
        "rank": f"{simulation.rank} of {simulation.world_size}",
        **{name: simulation.assumptions.get(name, "none") for name in CONDITIONS},
        "values of small tensors": str(simulation.with_values).lower(),
    }


def to_text(baseline: MemoryBaseline) -> str:
    """Return the content of its file: JSON with a row for each source line, so that a difference in git is readable."""
    head = TypeAdapter(MemoryBaseline).dump_python(baseline, mode="json")
    rows = ",\n".join(f"  {json.dumps(row)}" for row in head.pop("lines"))
    return f'{json.dumps(head, indent=1).removesuffix("}").rstrip()},\n "lines": [\n{rows}\n ]\n}}\n'


def write_baseline(file: Path, baseline: MemoryBaseline) -> None:
    """Write the file.

    Raises:
        InvalidInputError: it cannot be written.

    """
    try:
        write_atomically(file, to_text(baseline).encode())
    except OSError as error:
        raise InvalidInputError(
            f"a baseline must be a file that can be written, and {file} cannot be ({error.strerror}); name another"
        ) from error


def read_baseline(file: Path) -> MemoryBaseline:
    """Return the baseline of a file.

    Raises:
        InvalidInputError: there is no such file, or it is no baseline.

    """
    try:
        return TypeAdapter(MemoryBaseline).validate_json(file.read_bytes())
    except FileNotFoundError as error:
        raise InvalidInputError(f"a baseline must be a file, and {file} does not exist; {REMEDY}") from error
    except OSError as error:
        raise InvalidInputError(
            f"a baseline must be a readable file, and {file} is not ({error.strerror}); name another"
        ) from error
    except ValueError as error:
        raise InvalidInputError(
            f"a baseline is JSON that fitproof check --update has written, and {file} is not; name another file, or "
            "remove this one and write it with --update"
        ) from error


def check_comparable(baseline: MemoryBaseline, file: Path, *, card: str, torch: str) -> None:
    """Raise InvalidInputError if a baseline is of another card or of another torch than these."""
    for what, before, now in (("card", baseline.card, card), ("version of torch", baseline.torch, torch)):
        if now != before:
            raise InvalidInputError(
                f"a baseline and what is compared with it must be of one {what}, and {file} is of {before} where this "
                f"is {now}; check it with that {what}, or accept what it needs with this one: {REMEDY}"
            )
