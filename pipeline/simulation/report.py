"""What processes did on simulated cards, read from the folder into which they wrote it."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.simulation.library import MAX_CARDS

PEAKS, FUNCTION = f"<{MAX_CARDS}Q", "<80sIIQ"
"""The layout of report.c: bytes by card, then functions: name, kind, calls, largest number of bytes assumed."""
UNMODELLED, ASSUMED, ATTENTION, REFUSED = 1, 2, 3, 4
"""Kinds of functions in a report."""


@dataclass(frozen=True)
class UnknownRead:
    """A line of Python that read from a card what is not known."""

    place: str
    """File and line; `?` where no Python ran, as in a thread of the backward pass."""
    bytes: int
    count: int
    may_steer: bool
    """Whether the program's course may depend on it: a truth value, an integer, or a size that an operator found."""


@dataclass(frozen=True)
class Process:
    """What one process did on its cards."""

    pid: int
    peak_device_bytes: dict[int, int]
    """By the card's number in the machine: the most that it used of the card's memory, its context included."""
    unmodelled: dict[str, int]
    """Calls of functions that are not modelled, whose answers are zero or an error: its peaks prove nothing."""
    unknown_reads: tuple[UnknownRead, ...]
    assumed_bytes: dict[str, int]
    """The largest workspace assumed for each function of which only NVIDIA's library knows what it takes."""
    attention: tuple[str, ...]
    """The kernels of torch's attention that were chosen: flash, memory-efficient, cuDNN; none if products did it."""
    refused: tuple[str, ...]
    """What it did that a real card would refuse as well."""


def read_report(folder: Path) -> tuple[Process, ...]:
    """Return what each process wrote that used a card, by its number."""
    return tuple(sorted(map(_process, folder.glob("*.cards")), key=lambda process: process.pid))


def has_steering_read(folder: Path) -> bool:
    """Whether a process, which may still run, has read from a card what is not known and may steer it."""
    return any(read.may_steer for file in folder.glob("*.reads") for read in _unknown_reads(file))


def unknown_reads_of(folder: Path, pid: int) -> tuple[UnknownRead, ...]:
    """Return what a process, which may still run, has read from a card that is not known."""
    return tuple(_unknown_reads(folder / f"{pid}.reads"))


def _process(file: Path) -> Process:
    content = file.read_bytes()
    peaks = struct.unpack_from(PEAKS, content)
    functions = list(_functions(content[struct.calcsize(PEAKS) :]))
    return Process(
        pid=int(file.stem),
        peak_device_bytes={number: peak for number, peak in enumerate(peaks) if peak},
        unmodelled={name: calls for name, kind, calls, _ in functions if kind == UNMODELLED},
        unknown_reads=tuple(_unknown_reads(file.with_suffix(".reads"))),
        assumed_bytes={name: largest for name, kind, _, largest in functions if kind == ASSUMED},
        attention=tuple(sorted(name for name, kind, *_ in functions if kind == ATTENTION)),
        refused=tuple(sorted(name for name, kind, *_ in functions if kind == REFUSED)),
    )


def _functions(content: bytes) -> Iterator[tuple[str, int, int, int]]:
    for name, kind, calls, largest in struct.iter_unpack(FUNCTION, content):
        if kind:
            yield name.rstrip(b"\0").decode(), kind, calls, largest


def _unknown_reads(file: Path) -> Iterator[UnknownRead]:
    if file.exists():
        for line in file.read_text().splitlines():
            size, may_steer, count, place = line.split(" ", 3)
            yield UnknownRead(place=place, bytes=int(size), count=int(count), may_steer=may_steer == "1")
