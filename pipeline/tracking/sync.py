"""Sends the runs of ended processes that MLflow has not received completely."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlflow import MlflowClient

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.results import Outcome
from pipeline.runtime.ownership import is_gone, is_here
from pipeline.runtime.run_folder import RESULT, STEPS
from pipeline.tracking.store import STATUS, address_of, check_database, hide_credentials, is_refusal
from pipeline.tracking.unsent import NAME, UnsentRun

JOB_FOLDERS = "[0-9]" * 8 + "-" + "[0-9]" * 6 + "-*-*"
"""The names of the folders that jobs make."""


def sync(output: Path, *, others_ended: bool = False) -> Iterator[tuple[str, bool]]:
    """Send each run below `output` whose process has ended; yield a sentence on each, and whether MLflow has all of it.

    `others_ended` says that processes of other machines have, which cannot be seen from here.

    Raises:
        InvalidInputError: `output` is not a folder with the results of jobs, or it cannot be written.

    """
    _check(output)
    hide_credentials()
    unreachable: dict[str, Exception] = {}
    clients: dict[str, MlflowClient] = {}
    with _locked(output):
        for path in sorted(output.glob(f"**/{NAME}")):
            yield _sync_one(path, clients, unreachable, others_ended)


def send_abandoned(output: Path, uri: str, client: MlflowClient) -> None:
    """Send and end the runs below `output` that ended processes have left for the store `uri`, without a report."""
    with suppress(BlockingIOError), _locked(output, wait=False):  # else another process is sending them
        for path in sorted(output.glob(f"**/{NAME}")):
            try:
                run = UnsentRun.read(path)
            except (OSError, ValueError):
                continue
            if run.manifest.uri == uri and _is_abandoned(run):
                _end(run)
                if run.send(client) is not None:
                    return


def _sync_one(
    path: Path, clients: dict[str, MlflowClient], unreachable: dict[str, Exception], others_ended: bool
) -> tuple[str, bool]:
    try:
        run = UnsentRun.read(path)
    except FileNotFoundError:
        return f"{path.parent}: sent by its own process", True
    except (OSError, ValueError) as unreadable:
        text = f"{path} cannot be read ({first_line(unreadable)}); the results are in the files next to it"
        return text, False
    uri = run.manifest.uri
    owner = run.manifest.owner
    if owner is not None and not is_here(owner):
        if not others_ended:
            unseen = f"of a process on {owner['host']}, which cannot be seen from here"
            remedy = "run sync there or, if it has ended, set --others_ended true"
            return f"{path.parent}: {unseen}; {remedy}", False
    elif not _is_abandoned(run):
        return f"{path.parent}: skipped: another process is sending it", True
    _end(run)
    error = unreachable.get(uri) or _send(run, clients)
    if error is None:
        return f"{path.parent}: sent", True
    if is_refusal(error):
        remedy = f"delete {path} to skip it in future"
    else:
        unreachable[uri] = error
        remedy = "run sync again when the store is back"
    return f"{path.parent}: {uri} did not accept it ({first_line(error)}); {remedy}", False


def _send(run: UnsentRun, clients: dict[str, MlflowClient]) -> Exception | None:
    """Send a run with the client of its store, which is checked once, and return the error if there is one."""
    uri = run.manifest.uri
    try:
        if uri not in clients:
            os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
            address = address_of(uri)
            check_database(address)
            clients[uri] = MlflowClient(address)
        return run.send(clients[uri])
    except Exception as error:  # any error of a store, its driver or its network
        return error


def _is_abandoned(run: UnsentRun) -> bool:
    owner = run.manifest.owner
    return owner is None or is_gone(owner)


def _end(run: UnsentRun) -> None:
    """End a killed run: with the outcome in its result.json, else as interrupted, at the time of its last write."""
    if run.manifest.status is not None:
        return
    files = [run.folder / name for name in (NAME, STEPS) if (run.folder / name).exists()]
    last = int(max(file.stat().st_mtime for file in files) * 1000)
    outcome = _outcome(run.folder)
    tags = {**run.manifest.tags, "outcome": outcome.value}
    run.update(tags=tags, status=STATUS[outcome], end_time=last)


def _outcome(folder: Path) -> Outcome:
    """Return the outcome in a run's result.json; `interrupted` if there is none."""
    try:
        return Outcome(json.loads((folder / RESULT).read_text())["result"]["outcome"])
    except (OSError, ValueError, KeyError):
        return Outcome.INTERRUPTED


@contextmanager
def _locked(output: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the output folder's lock, so that one process at a time sends abandoned runs."""
    descriptor = os.open(output, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


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
