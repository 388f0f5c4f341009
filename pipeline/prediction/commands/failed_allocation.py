"""The allocation for which a simulated card had no memory: its line, its tensor, and what filled the card then."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.memory.breakdown import Breakdown, at_event
from pipeline.prediction.commands.smallest_memory import card_of, run_in
from pipeline.prediction.commands.snapshot import SourceLines, history_of
from pipeline.simulation.record import FailedAllocation, Record
from pipeline.simulation.run import OPERATORS, Simulate, SimulatedRun

BLOCK_BYTES = 512
"""Torch's allocator rounds requests up to multiples of it (kMinBlockSize in c10/core/AllocatorConfig.h)."""


@dataclass(frozen=True, kw_only=True)
class FailedTensor:
    """The tensor for which there was no memory."""

    operator: str
    """The operator of torch that was to make it, such as aten.mm."""
    shape: tuple[int, ...] | None
    """None if the memory was for the operator's own use, or for what torch does not tell the shape of."""
    dtype: str | None
    rounded_bytes: int | None
    """What the operator asked torch's allocator for, which asks the card for more."""
    module: str | None
    """Dotted name of the innermost module that ran the operator; None outside of modules and in the backward pass."""
    variable: str | None
    """The variable that was to hold it, as the source line says."""
    node: str | None
    """The node of autograd's graph that ran the operator in a backward pass."""


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """The allocation for which a card had no memory."""

    line: str
    """The line of the user's code, as file:line."""
    wanted_bytes: int
    free_bytes: int
    held: Breakdown | None = None
    """What was alive then, as if it were a peak; None if it is not known."""
    tensor: FailedTensor | None = None
    """None if it was not asked for, or is not known."""


def out_of_memory(run: SimulatedRun) -> OutOfMemory | None:
    """Return the allocation that ended the run; None if none did, or the script went on after it."""
    found = _failed(run)
    if found is None:
        return None
    record, failure = found
    return OutOfMemory(line=line_of(record, failure), wanted_bytes=failure.wanted_bytes, free_bytes=failure.free_bytes)


def held_then(run: SimulatedRun, roomy: SimulatedRun) -> Breakdown | None:
    """Return what was alive when the run failed, told by a run with room, which knows what became of each storage.

    None if the two do not allocate alike, or nothing was.
    """
    found = _failed(run)
    if found is None or not roomy.records:
        return None
    record, failure = found
    other = min(roomy.records, key=lambda one: one.rank != record.rank)
    card = card_of(other)
    if not (record.is_whole and other.is_whole) or card >= len(record.devices):
        return None
    trace = [event for event in record.trace(card) if event["time_us"] <= failure.time_us]
    asked = _rounded_bytes(record, failure)
    before = [event["size"] for event in trace if event["action"] == "alloc"]
    num_before = len(before)
    timeline = history_of(other, card).timeline
    allocations = [number for number, event in enumerate(timeline.events_E.tolist()) if event >= 0]
    if asked is None or not 0 < num_before < len(allocations):
        return None
    is_asked = _rounded(int(timeline.num_bytes_N[num_before])) == asked
    if not is_asked or timeline.num_bytes_N[:num_before].tolist() != before:
        return None
    event = allocations[num_before] - 1
    return at_event(timeline, event) if len(timeline.alive(event)) else None


def with_tensor(failed: OutOfMemory, wanted: Simulate, folder: Path) -> OutOfMemory:
    """Return the failed allocation with its tensor, which a run of the command tells whose operators are watched."""
    run = run_in(replace(wanted, hook=OPERATORS), folder)
    again = _failed(run)
    if again is None or again[1].wanted_bytes != failed.wanted_bytes:
        return failed
    file = folder / f"{again[0].pid}.operator"
    if not file.exists():
        return failed
    rounded = _rounded_bytes(*again)
    content: dict[str, Any] = json.loads(file.read_text())
    made = [one for one in content["made"] if _rounded(one[2]) == rounded]
    shape, dtype, _ = made[0] if made else (None, None, None)
    return replace(
        failed,
        tensor=FailedTensor(
            operator=content["operator"].rpartition(".")[0],
            shape=None if shape is None else tuple(shape),
            dtype=dtype,
            rounded_bytes=rounded,
            module=content["module"],
            variable=content["variable"],
            node=content["node"],
        ),
    )


def line_of(record: Record, failure: FailedAllocation) -> str:
    """Return the user's line of a failed allocation; autograd's threads have none, so that of backward() then."""
    code = SourceLines(record.own_code)
    around = [phase.stack for phase in record.phases if phase.begin_us <= failure.time_us <= phase.end_us]
    stacks = (failure.stack, *reversed(around))
    lines = [code.user_line(stack) or code.line(stack) for stack in stacks]
    return next((line for line in lines if line is not None), "unknown")


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _rounded_bytes(record: Record, failure: FailedAllocation) -> int | None:
    """Return what torch's allocator was asked for, rounded up to its blocks; None if the history does not have it."""
    events = [event for event in record.trace(card_of(record)) if event["action"] == "oom"]
    return next((event["size"] for event in reversed(events) if event["time_us"] <= failure.time_us), None)


def _failed(run: SimulatedRun) -> tuple[Record, FailedAllocation] | None:
    """Return the allocation that ended a process of the run, and this process; a launcher may end well all the same."""
    ended = [record for record in run.records if record.is_out_of_memory]
    if not ended and (run.exit_code == 0 or any(record.is_out_of_memory is False for record in run.records)):
        return None
    failures = [(record, failure) for record in ended or run.records for failure in record.out_of_memory[-1:]]
    return min(failures, key=lambda pair: pair[1].time_us, default=None)
