"""Predicted and real sequence of allocations of one configuration, aligned: the operator at which they differ."""

from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any

import torch

from pipeline.base.results import MemoryUse
from pipeline.config.experiment import Experiment
from pipeline.memory.blocks import MIN_BLOCK_BYTES, round_up
from pipeline.memory.device import hardware_of
from pipeline.prediction.trace import record
from pipeline.training.loop import train

Event = tuple[str, int, str]
"""+ or -, the rounded bytes, and where it happened."""
SHOWN = 6
"""Events shown of each side of a difference."""


class _Measured(Exception):
    """Two optimizer steps have been taken."""


def difference(experiment: Experiment) -> Iterator[str]:
    """Yield a line for each run of events that are equal, and for each difference of two optimizer steps."""
    expected, real = predicted_events(experiment), real_events(experiment)
    matcher = SequenceMatcher(None, [each[:2] for each in expected], [each[:2] for each in real], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            yield f"{i2 - i1} equal"
        else:
            yield from (f"  predicted {text}" for text in _told(expected[i1:i2]))
            yield from (f"  real      {text}" for text in _told(real[j1:j2]))


def predicted_events(experiment: Experiment) -> list[Event]:
    """Return the predicted allocations and releases of two optimizer steps."""
    prepared = experiment.prepare()
    timeline = record(experiment, hardware_of(experiment.device), prepared, experiment.effective_batch_size)
    events = []
    for event in timeline.events:
        lifetime = timeline.lifetimes[event if event >= 0 else -1 - event]
        if lifetime.num_bytes:
            size = round_up(lifetime.num_bytes, MIN_BLOCK_BYTES)
            events.append(("+" if event >= 0 else "-", size, f"{lifetime.operator} in {lifetime.module}"))
    return events


def real_events(experiment: Experiment) -> list[Event]:
    """Return the allocations and releases that torch recorded of two optimizer steps on the device."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=10_000_000)

    def end(message: Any) -> None:
        if isinstance(message, MemoryUse):
            raise _Measured

    try:
        train(experiment, experiment.prepare(), end)
    except _Measured:
        pass
    trace = torch.cuda.memory._snapshot()["device_traces"][experiment.device.index or 0]
    torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": "+", "free_completed": "-"}
    return [
        (signs[entry["action"]], round_up(entry["size"], MIN_BLOCK_BYTES), _place(entry))
        for entry in trace
        if entry["action"] in signs
    ]


def _place(entry: dict[str, Any]) -> str:
    frames = [f"{frame['filename'].rpartition('/')[2]}:{frame['line']}" for frame in entry.get("frames", [])]
    return " < ".join(frames[:4])


def _told(events: list[Event]) -> Iterator[str]:
    """Yield the first events as text, equal ones together."""
    groups = [(event, len(list(group))) for event, group in groupby(events)]
    for (sign, size, place), count in groups[:SHOWN]:
        yield f"{sign}{size:>14,} {place}" + (f" ({count} times)" if count > 1 else "")
    if len(groups) > SHOWN:
        yield f"... {len(groups) - SHOWN} more"
