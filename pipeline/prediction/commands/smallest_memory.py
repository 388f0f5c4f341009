"""The smallest memory of a card on which a command runs."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.base.units import MIB
from pipeline.memory.allocator_options import VARIABLES, options_in, with_expandable_segments
from pipeline.simulation.environment import environment, python_of
from pipeline.simulation.process import replay
from pipeline.simulation.record import Record
from pipeline.simulation.run import Simulate, SimulatedRun, run_command, with_room

TOLERANCE = 0.02
"""Where only runs of the command tell the smallest memory, it is found to this share of it."""
ROOM = 1.25
"""Memory of the card on which requests are given again, as a multiple of what they used."""
SAME_PEAK = 0.005
"""Peaks of two runs that differ by no more than this share are called equal."""


@dataclass(frozen=True, kw_only=True)
class SmallestMemory:
    """The smallest memory of a card, its context included; None where it is not known."""

    num_bytes: int | None = None
    """On which the command ran."""
    num_bytes_expandable: int | None = None
    """With the allocator's expandable segments, as torch's allocator served the same requests."""
    note: str | None = None
    """What limits these."""


def card_of(record: Record) -> int:
    """Return the number of the card that a process used most."""
    return max(range(len(record.devices)), key=lambda number: record.devices[number].peak_reserved_bytes)


def device_bytes(run: SimulatedRun, record: Record) -> int:
    """Return the most that a process used of its card, as the card counted it."""
    [process] = [one for one in run.processes if one.pid == record.pid]
    return max(process.peak_device_bytes.values())


def smallest_memory(wanted: Simulate, run: SimulatedRun, folder: Path) -> SmallestMemory:
    """Return the smallest memory for a command that ran with room.

    torch's allocator is given the run's requests again under caps, and the command runs once on a card of the size that
    was found. Where the requests cannot be given again, or the command then needs more, runs of the command tell.
    """
    folder.mkdir()
    expandable_segments = with_expandable_segments({**os.environ, **wanted.variables})
    plain, expandable = replayed(wanted, run, ({}, expandable_segments))
    if plain is not None and _runs(wanted, plain, folder / "confirmed"):
        return SmallestMemory(num_bytes=plain, num_bytes_expandable=expandable)
    again = run_in(with_room(wanted), folder / "again")
    if not again.is_complete or not again.records:
        note = "The smallest memory is not known: run again, the command did not end as it did at first."
        return SmallestMemory(num_bytes_expandable=expandable, note=note)
    found = _by_runs(wanted, again, folder)
    first, second = (max(_peak(one) for one in each.records) for each in (run, again))
    note = f"The smallest memory was found by runs of the command, to {TOLERANCE:.0%}."
    if found is None:
        note = "The smallest memory is not known: on a card with as much as it used, the command did not run again."
    if abs(second / first - 1) > SAME_PEAK:
        note += (
            f" Run again, it peaked at {second / MIB:,.1f} MiB allocated instead of {first / MIB:,.1f}, as with "
            "torch.compile, whose first run fills its cache, or with random sizes."
        )
    return SmallestMemory(num_bytes=found, num_bytes_expandable=expandable, note=note)


def _peak(record: Record) -> int:
    return record.devices[card_of(record)].peak_allocated_bytes


def _by_runs(wanted: Simulate, run: SimulatedRun, folder: Path) -> int | None:
    """Return the smallest memory by bisection between what the run had allocated and what it used of the card."""
    high = max(device_bytes(run, record) for record in run.records)
    if not _runs(wanted, high, folder / "all"):
        return None
    low = max(_peak(record) + _beside(run, record) for record in run.records)
    while high - low > max(2 * replay.GRANULE, TOLERANCE * high):
        middle = (low + high) // 2 // replay.GRANULE * replay.GRANULE
        if _runs(wanted, middle, folder / f"{middle}"):
            high = middle
        else:
            low = middle
    return high


def run_in(
    wanted: Simulate, folder: Path, *, is_hidden: bool = True, ends_at_steering_read: bool = False
) -> SimulatedRun:
    """Run a command that records in a new folder; its output is shown or, if it `is_hidden`, goes into FOLDER.log."""
    folder.mkdir(parents=True)
    log = folder.with_suffix(".log") if is_hidden else None
    return run_command(wanted, folder, log, ends_at_steering_read=ends_at_steering_read)


def _runs(wanted: Simulate, num_bytes: int, folder: Path) -> bool:
    """Whether the command runs on a card with so much memory."""
    return run_in(with_room(wanted, num_bytes), folder).is_complete


def _beside(run: SimulatedRun, record: Record) -> int:
    """Return what a process used of its card beside what torch's allocator reserved: its context and libraries."""
    return device_bytes(run, record) - record.devices[card_of(record)].peak_reserved_bytes


def replayed(wanted: Simulate, run: SimulatedRun, allocators: Sequence[Mapping[str, str]]) -> tuple[int | None, ...]:
    """Return the memory that the most demanding process needs, as torch's allocator serves its requests under caps.

    There is an answer for each of the `allocators`, which are variables of the environment: None where the requests
    cannot be given again. Options that the command gives its allocator itself count instead. The card has little more
    memory than was used, since expandable segments take addresses for all of it, of which a process has 32 TiB.
    """
    needed = []
    for record in run.records:
        python = python_of(record.command)
        memory_mib = int(ROOM * device_bytes(run, record) / MIB)
        card = environment(replace(wanted.card, memory_mib=memory_mib), python=python)
        variables, tried = {**os.environ, **wanted.variables, **card}, list(allocators)
        if (record.allocator or "default") != options_in(variables):
            tried = [dict.fromkeys(VARIABLES, record.allocator)]
        words = [str(python), replay.__file__, str(record.snapshot), str(card_of(record)), json.dumps(tried)]
        done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
        caps: list[int | None] = json.loads(done.stdout.splitlines()[-1] if done.returncode == 0 else "null") or [
            None for _ in tried
        ]
        caps *= len(allocators) // len(tried)
        needed.append([None if cap is None else cap + _beside(run, record) for cap in caps])
    return tuple(None if None in of_one else max(of_one) for of_one in zip(*needed, strict=True))
