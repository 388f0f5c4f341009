"""What a run has to tell MLflow, on local disk before it is sent: a line for each record, and one for what has arrived.

The process that writes a journal holds its lock, which ends with the process however it ends. What a kill, an outage or
a full disk leaves behind is therefore what `sync` has to send, and no two processes send the same journal at once.
Lines reach the operating system one by one, so that they outlive the process; they are not forced to the disk.
"""

import fcntl
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

NAME = "unsent.jsonl"
"""The file of this name in a run's folder."""
KINDS = ("params", "tags", "dataset", "metrics", "file", "end")
"""What a record may tell."""


@dataclass(frozen=True)
class Record:
    """One thing to tell MLflow, as plain data."""

    number: int
    """Counted from 0 in each run."""
    kind: str
    """One of KINDS."""
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What must be known to create the run."""

    uri: str
    """The tracking store, as it may stand in a file."""
    experiment_id: str
    name: str
    tags: Mapping[str, str]
    time: int
    """When it began, in milliseconds since 1970, as MLflow counts."""
    key: str
    """What tells the run from every other before MLflow has given it an id."""
    run_id: str | None = None
    """MLflow's id; None where MLflow does not know the run yet."""


@dataclass
class Contents:
    """What stands in a journal."""

    start: Start | None = None
    """None where that line is damaged."""
    records: dict[int, Record] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    """Numbers of the records that have arrived."""
    damaged: list[int] = field(default_factory=list)
    """Lines, counted from 1, that cannot be read."""

    @property
    def status(self) -> str | None:
        """How the run ended; None where its process did not come to say."""
        return next((str(r.data.get("status")) for r in self.records.values() if r.kind == "end"), None)

    @property
    def outcome(self) -> str | None:
        """The outcome that was measured; None where there is none."""
        tags = [r.data.get("values", {}) for r in self.records.values() if r.kind == "tags"]
        return next((str(values["outcome"]) for values in tags if "outcome" in values), None)

    def add_line(self, line: Any) -> None:
        """Add what a line says."""
        match line:
            case {"start": dict(start)}:
                self.start = Start(**start)
            case {"run_id": str(run_id)} if self.start is not None:
                self.start = replace(self.start, run_id=run_id)
            case {"sent": list(numbers)}:
                self.sent |= set(numbers)
            case {"number": int(number), "kind": kind, "data": dict(data)} if kind in KINDS:
                self.records[number] = Record(number, kind, data)
            case _:
                raise ValueError(f"no line of a journal: {line}")


class Journal:
    """One journal, open and locked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        self._torn = self._complained = False

    @classmethod
    def create(cls, folder: Path, start: Start) -> Self:
        """Begin a journal; it appears under its name once it is locked and has its first line.

        Raises:
            OSError: the folder cannot be written.

        """
        part = folder / f"{NAME}.part"
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        with suppress(OSError):  # a file system without locks: sync will say so
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        journal = cls(folder / NAME, descriptor)
        os.write(descriptor, _line({"start": asdict(start)}))
        part.rename(journal.path)
        return journal

    @classmethod
    def take_over(cls, path: Path) -> Self | None:
        """Open a journal that another process has left; None where one still holds it, or has just sent all of it.

        Raises:
            OSError: it cannot be opened for writing, or its file system has no locks.

        """
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        if not os.fstat(descriptor).st_nlink:
            os.close(descriptor)
            return None
        return cls(path, descriptor)

    def created(self, run_id: str) -> None:
        """Keep the id that MLflow has given the run."""
        self._write({"run_id": run_id})

    def add(self, record: Record) -> None:
        """Keep a record."""
        self._write({"number": record.number, "kind": record.kind, "data": record.data})

    def arrived(self, numbers: Sequence[int]) -> None:
        """Keep that these records have arrived."""
        self._write({"sent": list(numbers)})

    def close(self, remove: bool) -> None:
        """Let go of it, and remove it where all that it holds has arrived."""
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _write(self, line: Mapping[str, Any]) -> None:
        """Append a line, on a line of its own even after one that was cut off; a full disk is said once."""
        data = (b"\n" if self._torn else b"") + _line(line)
        try:
            self._torn = os.write(self._descriptor, data) < len(data)
            problem = "only in part" if self._torn else None
        except OSError as error:
            self._torn, problem = True, error.strerror
        if problem and not self._complained:
            self._complained = True
            print(f"tracking: {self.path} cannot be written ({problem}); going on without it", file=sys.stderr)  # noqa: T201


def read(path: Path) -> Contents:
    """Return what stands in a journal, leaving out the lines that are damaged.

    Raises:
        OSError: it cannot be read.

    """
    contents = Contents()
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            contents.add_line(json.loads(line))
        except (ValueError, TypeError):  # not JSON, or not what this module writes
            contents.damaged.append(number)
    return contents


def known_ends(output: Path) -> dict[str, str]:
    """Return the status of each run whose end waits in a journal below `output`, by MLflow's id."""
    ends = {}
    for path in output.glob(f"**/{NAME}"):
        with suppress(OSError):
            contents = read(path)
            if contents.start and contents.start.run_id and contents.status:
                ends[contents.start.run_id] = contents.status
    return ends


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
