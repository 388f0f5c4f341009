"""What processes did on simulated cards, read from the folder into which they wrote it."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_CARDS, MAX_FUNCTIONS = 16, 512
PEAKS, FUNCTION = f"<{MAX_CARDS}Q", "<88sQ"
"""The layout of report.c: bytes by card, then functions by name, each with its number of calls."""


@dataclass(frozen=True)
class Process:
    """What one process did on its cards."""

    pid: int
    peak_device_bytes: dict[int, int]
    """By the card's number in the machine: the most that it used of the card's memory, its context included."""
    unmodelled: dict[str, int]
    """Calls of functions that are not modelled, whose answers are zero or an error: its peaks prove nothing."""


def read_report(folder: Path) -> tuple[Process, ...]:
    """Return what each process wrote that used a card, in the order in which they began to."""
    files = sorted(folder.glob("*.cards"), key=lambda file: file.stat().st_ctime_ns)
    return tuple(_process(file) for file in files)


def _process(file: Path) -> Process:
    content = file.read_bytes()
    peaks = struct.unpack_from(PEAKS, content)
    return Process(
        pid=int(file.stem),
        peak_device_bytes={number: peak for number, peak in enumerate(peaks) if peak},
        unmodelled=dict(_functions(content[struct.calcsize(PEAKS) :])),
    )


def _functions(content: bytes) -> Iterator[tuple[str, int]]:
    for name, calls in struct.iter_unpack(FUNCTION, content):
        if calls:
            yield name.rstrip(b"\0").decode(), calls
