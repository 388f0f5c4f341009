"""The records that processes on simulated cards leave behind, as `process/watch.py` writes them."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

StackFrame = tuple[str, int, str]
"""File, line and function."""


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """The time between which a phase of the training ran."""

    phase: str
    begin_us: int
    end_us: int
    stack: tuple[StackFrame, ...]
    """Where the script started it, the innermost frame first."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The addresses of the tensors of one category at a moment."""

    time_us: int
    category: str
    addresses: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FailedAllocation:
    """An allocation that a card had no memory for."""

    time_us: int
    wanted_bytes: int
    free_bytes: int
    """What the card had left."""
    stack: tuple[StackFrame, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What torch's allocator counted on one card."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one process left behind."""

    pid: int
    command: tuple[str, ...]
    rank: int
    begin_us: int
    """When the process was started."""
    end_us: int
    """When it wrote this."""
    ended_by: str
    is_out_of_memory: bool | None
    """Whether the error that ended it is torch's of a full card; None without an error."""
    phases: tuple[PhaseTime, ...]
    """In the order in which they ended."""
    marks: tuple[Mark, ...]
    steps: tuple[int, ...]
    """Microseconds at which each optimizer step ended."""
    out_of_memory: tuple[FailedAllocation, ...]
    devices: tuple[DeviceMemory, ...]
    is_whole: bool
    """Whether the snapshot has all events of the allocator, and not the latest ones alone."""
    workspace_bytes: tuple[int, ...]
    """Sizes of the workspaces of cuBLAS and cuBLASLt."""
    versions: Mapping[str, str | None]
    allocator: str
    """The options of torch's allocator, of the environment or the script's own."""
    own_code: tuple[str, ...]
    """Folders of code that is not the user's."""
    snapshot: Path
    """The file of torch's memory snapshot."""
    has_late_optimizer: bool = False
    """Whether one of its optimizers had taken too few steps when it was ended by its number of steps."""
    num_communicators: int = 0
    """Process groups that NCCL would serve, of a command that runs as one rank of many."""

    @property
    def has_allocated(self) -> bool:
        """Whether torch's allocator had memory of a card."""
        return any(device.peak_reserved_bytes for device in self.devices)

    @property
    def updates_itself(self) -> bool:
        """Whether its optimizer steps are none of torch's optimizers."""
        return bool(self.steps) and not any(phase.phase == "optimizer" for phase in self.phases)

    def trace(self, device: int) -> Sequence[Mapping[str, Any]]:
        """Return the events of torch's allocator on a card, the oldest first."""
        with self.snapshot.open("rb") as file:  # written by the process that this one has started
            found: Sequence[Mapping[str, Any]] = pickle.load(file)["device_traces"][device]  # noqa: S301
        return found


def read_records(folder: Path) -> tuple[Record, ...]:
    """Return the records in a folder, by rank."""
    adapter = TypeAdapter(Record)
    contents = (TypeAdapter(dict[str, Any]).validate_json(file.read_bytes()) for file in folder.glob("*.json"))
    records = [adapter.validate_python({**one, "snapshot": folder / f"{one['pid']}.pickle"}) for one in contents]
    return tuple(sorted(records, key=lambda record: (record.rank, record.pid)))
