"""Sending what could not be sent: the journals that ended jobs have left in the output folder."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mlflow import MlflowClient
from mlflow.tracking import get_tracking_uri

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.results import Outcome
from pipeline.tracking.journal import NAME, Contents, Journal, known_ends, read
from pipeline.tracking.orphans import STATUS, end_orphans
from pipeline.tracking.outbox import Outbox, is_refusal
from pipeline.tracking.store import lasting, try_database

JOB_FOLDERS = "[0-9]" * 8 + "-" + "[0-9]" * 6 + "-*-*"
"""The names of the folders that jobs make."""


@dataclass(frozen=True)
class Report:
    """What became of one journal."""

    words: str
    complete: bool
    """Whether there is nothing of it left to send."""


@dataclass
class _Stores:
    """The tracking stores that the journals name."""

    clients: dict[str, MlflowClient] = field(default_factory=dict)
    away: dict[str, Exception] = field(default_factory=dict)
    """What a store said that could not be reached: it is not asked again."""
    experiments: set[tuple[str, str]] = field(default_factory=set)
    """URI and id of each experiment that journals name."""

    def send(self, outbox: Outbox, uri: str) -> Exception | None:
        """Send what waits in an outbox and return what hindered the rest."""
        trouble = self.away.get(uri)
        if trouble is not None:
            return trouble
        try:
            trouble = outbox.send(self._client(uri))
        except Exception as error:  # whatever a store, its driver or its network raises
            trouble = error
        if trouble is not None and not is_refusal(trouble):
            self.away[uri] = trouble
        return trouble

    def end_orphans(self, output: Path) -> Iterator[Report]:
        """End the runs whose process is gone in the experiments of all stores that answer; yield what went wrong."""
        for uri, experiment_id in sorted(self.experiments):
            if uri in self.away:
                continue
            try:
                end_orphans(self._client(uri), experiment_id, known_ends(output))
            except Exception as error:  # as above
                yield Report(f"runs of ended processes may still be RUNNING ({first_line(error)})", complete=False)

    def _client(self, uri: str) -> MlflowClient:
        if uri not in self.clients:
            os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
            try_database(uri)
            self.clients[uri] = MlflowClient(uri)
        return self.clients[uri]


def sync(output: Path) -> Iterator[Report]:
    """Send each journal below `output` whose process is gone, and yield what became of it; then end orphaned runs.

    Raises:
        InvalidInputError: `output` is not a folder in which jobs have left their files, or it cannot be written.

    """
    _check(output)
    stores = _Stores()
    for path in sorted(output.glob(f"**/{NAME}")):
        yield _sync_one(path, stores)
    yield from stores.end_orphans(output)


def _sync_one(path: Path, stores: _Stores) -> Report:
    try:
        journal = Journal.take_over(path)
        contents = read(path)
    except FileNotFoundError:
        return Report(f"{path.parent}: sent by another process", complete=True)
    except OSError as error:
        return Report(f"{path} must be a file that can be written and locked ({error.strerror})", complete=False)
    if journal is None:
        return Report(f"{path.parent}: left to the process that is sending it", complete=True)
    if contents.start is None:
        journal.close(remove=False)
        return Report(_damage(path, contents), complete=False)
    outbox = Outbox(journal, contents.start, contents)
    if contents.status is None:
        _end(outbox, contents, path)
    num_records = len(outbox)
    stores.experiments.add((_address(contents.start.uri), contents.start.experiment_id))
    trouble = stores.send(outbox, _address(contents.start.uri))
    words = f"{path.parent}: {num_records - len(outbox)} of {num_records} records sent"
    if trouble is not None:
        remedy = f"delete {path} to leave it so" if is_refusal(trouble) else "repeat this when it is back"
        words += f"; {contents.start.uri} did not take the rest ({first_line(trouble)}); {remedy}"
    if contents.damaged:
        words += f"; {_damage(path, contents)}"
    return Report(words, complete=outbox.close())


def _end(outbox: Outbox, contents: Contents, path: Path) -> None:
    """End a run whose process was killed as what was measured of it, at the time when it wrote last."""
    outcome = Outcome(contents.outcome or Outcome.INTERRUPTED)
    last = int(path.stat().st_mtime * 1000)
    if contents.outcome is None:
        outbox.add("tags", values={"outcome": outcome.value})
    outbox.add("end", status=STATUS[outcome], time=last)


def _damage(path: Path, contents: Contents) -> str:
    lines = ", ".join(str(line) for line in contents.damaged)
    return f"{path} is damaged in line {lines or 1}, the rest is sent; what was measured is in the files beside it"


def _address(uri: str) -> str:
    """Return where to send what belongs to `uri`: the current store where it is the same, since it has its password."""
    current = get_tracking_uri()
    return current if lasting(current) == uri else uri


def _check(output: Path) -> None:
    problem = None
    if not output.is_dir():
        problem = "is no folder"
    elif not os.access(output, os.R_OK | os.W_OK | os.X_OK):
        problem = "cannot be written"
    elif any(output.iterdir()) and not any(output.glob(JOB_FOLDERS)):
        problem = "holds none"
    if problem:
        raise InvalidInputError(
            f"sync needs the output folder of earlier jobs, and {output} {problem}; set output to the folder with the "
            "results"
        )
