"""Where a prediction differs from a real run: in the sequence of allocations, or in what the allocator does with it."""

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any

import recordings
import torch
from simulated_training import train_any_weights

from pipeline.base.results import MemoryUse
from pipeline.config.experiment import Experiment
from pipeline.memory.blocks import MIN_BLOCK_BYTES, round_up
from pipeline.memory.device import hardware_of
from pipeline.prediction.trace import record
from pipeline.runtime.environment import uses_expandable_segments

Event = tuple[str, int, str]
"""+ or -, the rounded bytes, and where it happened."""
SHOWN = 8
"""Events shown of each side of a difference."""
SIGNS = {"alloc": "+", "free_completed": "-"}
"""torch's names of the actions that are compared."""


class _TwoStepsError(Exception):
    """Ends a run after two optimizer steps."""


def difference(experiment: Experiment) -> Iterator[str]:
    """Yield the peaks of the real sequence on both allocators, each run of equal events, and each difference."""
    expected = sorted_releases(predicted_events(experiment))  # first: the run changes torch in this process
    snapshot, memory = real_snapshot(experiment)
    index = experiment.device.index or 0
    recorded = recordings.events_of(snapshot, index)
    simulated = recordings.replay(recorded, expandable_segments=uses_expandable_segments(experiment))
    yield f"real allocations on the real allocator: {memory.peak_allocated_bytes:,} {memory.peak_reserved_bytes:,}"
    yield f"on the simulated allocator: {simulated.peak_allocated_bytes:,} {simulated.peak_reserved_bytes:,}"
    real = sorted_releases(events_of(snapshot["device_traces"][index]))
    matcher = SequenceMatcher(None, [each[:2] for each in expected], [each[:2] for each in real], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            yield f"{i2 - i1} equal"
        else:
            yield from (f"  predicted {text}" for text in _as_text(expected[i1:i2]))
            yield from (f"  real      {text}" for text in _as_text(real[j1:j2]))


def sorted_releases(events: Sequence[Event]) -> list[Event]:
    """Return the events with consecutive releases in order of size: the allocator's state after them is the same."""
    groups = [(sign, list(group)) for sign, group in groupby(events, lambda event: event[0])]
    return [event for sign, group in groups for event in (sorted(group) if sign == "-" else group)]


def predicted_events(experiment: Experiment) -> list[Event]:
    """Return the predicted allocations and releases of two optimizer steps."""
    prepared = experiment.prepare()
    timeline = record(experiment, hardware_of(experiment.device), prepared, experiment.effective_batch_size)
    events = []
    lifetimes = timeline.lifetimes
    for event in timeline.events_E:
        lifetime = lifetimes[event if event >= 0 else -1 - event]
        if lifetime.num_bytes:
            size = round_up(lifetime.num_bytes, MIN_BLOCK_BYTES)
            events.append(("+" if event >= 0 else "-", size, f"{lifetime.operator} in {lifetime.module}"))
    return events


def real_snapshot(experiment: Experiment) -> tuple[dict[str, Any], MemoryUse]:
    """Return what torch records of two optimizer steps, and the peaks."""
    received: list[MemoryUse] = []

    def end(message: Any) -> None:
        if isinstance(message, MemoryUse):
            received.append(message)
            raise _TwoStepsError

    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=10_000_000)
    try:
        train_any_weights(experiment, experiment.prepare(), end)
    except _TwoStepsError:
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return snapshot, received[0]


def events_of(history: Sequence[dict[str, Any]]) -> list[Event]:
    """Return the allocations and releases of a history."""
    return [
        (SIGNS[entry["action"]], round_up(entry["size"], MIN_BLOCK_BYTES), _place(entry))
        for entry in history
        if entry["action"] in SIGNS
    ]


def _place(entry: dict[str, Any]) -> str:
    frames = [f"{frame['filename'].rpartition('/')[2]}:{frame['line']}" for frame in entry.get("frames", [])]
    return " < ".join(frames[:4])


def _as_text(events: Sequence[Event]) -> Iterator[str]:
    """Yield the first events as text, equal ones together."""
    groups = [(event, len(list(group))) for event, group in groupby(events)]
    for (sign, size, place), count in groups[:SHOWN]:
        yield f"{sign}{size:>14,} {place}" + (f" ({count} times)" if count > 1 else "")
    if len(groups) > SHOWN:
        yield f"... {len(groups) - SHOWN} more"
