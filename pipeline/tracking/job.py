"""A job and its runs as MLflow runs: the run that `mlflow run` has created, or a new one, is the parent of all."""

import json
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run as MlflowRun
from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
from mlflow.tracking.context.registry import resolve_tags

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.results import Outcome, Result, StepRecord
from pipeline.config.experiment import Experiment
from pipeline.config.settings import in_use
from pipeline.memory.allocator_options import options_in
from pipeline.runtime.environment import environment
from pipeline.runtime.observer import Observer, Run
from pipeline.runtime.ownership import this_process
from pipeline.runtime.run_folder import CONFIG, LOG, RESULT, milliseconds_now, write_result_file
from pipeline.tracking.description import description
from pipeline.tracking.experiment import find_or_create, set_kind
from pipeline.tracking.run_of_job import take_run_of_job
from pipeline.tracking.sender import Sender
from pipeline.tracking.store import STATUS, connect, portable_uri, unreachable
from pipeline.tracking.sync import send_abandoned
from pipeline.tracking.unsent import Manifest, UnsentRun
from pipeline.training.metrics import PREDICTION, Summary

SECONDS_BETWEEN_BATCHES = 5.0
"""How often the optimizer steps of a run are sent while it trains."""
DESCRIPTION = "mlflow.note.content"
"""The tag that MLflow shows as a run's description."""
TAG_CHARACTERS = 5000
"""The longest tag that every MLflow store takes."""
RANDOM_NAME = re.compile(r"[a-z]+-[a-z]+-\d+")
"""The form of the names that MLflow generates, such as merciful-smelt-439."""
ENVIRONMENT_TAGS = ("device_name", "git_commit", "torch", "transformers", "cuda")
"""Facts about the environment that are tags of each run."""


class TrackedRun(UnsentRun):
    """A run of this process; what is logged is on disk before it is sent in the background."""

    def __init__(self, folder: Path, manifest: Manifest, sender: Sender) -> None:
        super().__init__(folder, manifest)
        self._sender = sender
        self.update()
        sender.add(self)

    def params(self, params: Mapping[str, Any]) -> None:
        """Log settings, those of techniques that are in use; None is logged as on the command line, as `none`."""
        values = {name: "none" if value is None else str(value) for name, value in in_use(params).items()}
        self._log(params={**self.manifest.params, **values})

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags, shortened to the length that every store accepts."""
        values = {name: text[:TAG_CHARACTERS] for name, text in tags.items()}
        self._log(tags={**self.manifest.tags, **values})

    def metrics(self, values: Mapping[str, float]) -> None:
        """Log summary metrics, by their names in files."""
        line = {"values": dict(values), "time": milliseconds_now()}
        self._log(metrics=(*self.manifest.metrics, line))

    def dataset(self, name: str, digest: str, source: str, num_sequences: int) -> None:
        """Log the corpus as the run's training data."""
        about = {"name": name, "digest": digest}
        profile, where = json.dumps({"sequences": num_sequences}), json.dumps({"source": source})
        self._log(dataset={**about, "source": where, "profile": profile})

    def file(self, name: str, content: str | bytes, artifact_path: str | None = None) -> None:
        """Write a file into the run's folder and log it as an artifact.

        Raises:
            InvalidInputError: it cannot be written.

        """
        write_result_file(self.folder / name, content)
        self.existing_files((name, artifact_path))

    def existing_files(self, *files: tuple[str, str | None]) -> None:
        """Log files of the run's folder as artifacts: (name, folder among the artifacts)."""
        self._log(artifacts=(*self.manifest.artifacts, *files))

    def end(self, status: str) -> None:
        """End the run."""
        self._log(status=status, end_time=milliseconds_now())

    def _log(self, **changes: Any) -> None:
        self.update(**changes)
        self._sender.send(self)


class Job(TrackedRun):
    """The parent run of a job."""

    def __init__(self, folder: Path, manifest: Manifest, sender: Sender, entry: str) -> None:
        super().__init__(folder, manifest, sender)
        self.children = ChildRuns(manifest, sender, entry)
        self.succeeded = True
        """Whether the run ends FINISHED; a job that completed nothing sets it to False."""

    def describe(self, question: str, answer: str, report: str) -> None:
        """Log question and answer as tags, and the report as the run's description in Markdown."""
        self.tags({"question": question, "answer": answer})
        self._log(tags={**self.manifest.tags, DESCRIPTION: report})


@dataclass(frozen=True)
class ChildRuns:
    """Makes the child runs of the job with this manifest."""

    parent: Manifest
    sender: Sender
    entry: str

    def observer(self) -> Observer:
        """Return an observer that mirrors one run as a child run."""
        return _ChildRun(self)

    def lost(self, study_key: str, trial: int) -> None:
        """End in the background the run of a trial whose worker died, which no process of its own ends."""
        self.sender.do(partial(end_lost, self.sender.client, self.parent.experiment_id, study_key, trial))


class _ChildRun(Observer):
    """Mirrors one run as one of the child runs of a job."""

    def __init__(self, siblings: ChildRuns) -> None:
        self._siblings = siblings
        self._run: Run | None = None
        self._ended: tuple[Result, Mapping[str, float]] | None = None
        """The result and the summary metrics, once it has ended."""
        self._child: TrackedRun | None = None
        self._sent_at = 0.0

    def started(self, run: Run) -> None:
        """Begin the child run."""
        self._run = run
        runnable, about = run.runnable, environment(run.runnable.device)
        tags = {
            **resolve_tags(),
            "mlflow.parentRunId": str(self._siblings.parent.run_id),
            "technique": self._siblings.entry,
            "device": str(runnable.device),
            **{name: value for name, value in about.items() if name in ENVIRONMENT_TAGS},
            "allocator": options_in({**os.environ, **runnable.environment}),
            **run.labels,
        }
        if runnable.environment:  # variables that techniques set for the run's process
            tags["environment"] = " ".join(f"{name}={value}" for name, value in runnable.environment.items())
        manifest = replace(
            self._siblings.parent,
            name=run.name,
            key=uuid.uuid4().hex,
            start_time=milliseconds_now(),
            run_id=None,
            tags=tags,
        )
        self._child = TrackedRun(run.folder, manifest, self._siblings.sender)
        self._sent_at = time.monotonic()
        self._child.params(runnable.params())
        if isinstance(runnable, Experiment):
            prepared = runnable.prepare()
            self._child.dataset(runnable.settings.corpus, prepared.digest, prepared.source, len(prepared.train))
        self._child.existing_files((CONFIG, None))

    def step(self, record: StepRecord) -> None:
        """Send the optimizer steps of the last seconds."""
        if self._child is not None and time.monotonic() - self._sent_at > SECONDS_BETWEEN_BATCHES:
            self._sent_at = time.monotonic()
            self._siblings.sender.send(self._child)

    def finished(self, result: Result, summary: Summary) -> None:
        """End the child run with its outcome, summary metrics and files."""
        run, child = self._run, self._child
        if run is None or child is None:
            return
        try:
            child.metrics(summary.metrics)
            self._ended = result, summary.metrics
            others = {"outcome_detail": result.detail, PREDICTION: summary.prediction}
            known = {name: text for name, text in others.items() if text}
            note = description(run, result, summary.metrics)
            child.tags({"outcome": result.outcome.value, **known, DESCRIPTION: note})
            names = [RESULT, *([LOG] if result.outcome in (Outcome.CRASHED, Outcome.OUT_OF_MEMORY) else [])]
            traces = sorted(child.folder.glob("traces/*"))
            files = [(name, None) for name in names] + [(f"traces/{trace.name}", "traces") for trace in traces]
            child.existing_files(*(file for file in files if (child.folder / file[0]).exists()))
        finally:
            child.end(STATUS[result.outcome])

    def amended(self, metrics: Mapping[str, float]) -> None:
        """Replace summary metrics of the child run, which has ended, there and in its description."""
        if self._run is not None and self._child is not None and self._ended is not None:
            result, before = self._ended
            self._child.metrics(metrics)
            self._child.tags({DESCRIPTION: description(self._run, result, {**before, **metrics})})


def end_lost(client: MlflowClient, experiment_id: str, study_key: str, trial: int) -> None:
    """End the runs of a trial that are still running, as interrupted; a store that cannot be reached is left alone.

    Trials are counted from 0, and their tags from 1.
    """
    running = f"attributes.status = 'RUNNING' and tags.study_key = '{study_key}' and tags.trial = '{trial + 1}'"
    with suppress(Exception):  # any error of a store, its driver or its network
        for run in client.search_runs([experiment_id], running):
            client.set_tag(run.info.run_id, "outcome", Outcome.INTERRUPTED.value)
            client.set_terminated(run.info.run_id, STATUS[Outcome.INTERRUPTED])


@contextmanager
def join_job(run_id: str | None, uri: str, output: Path) -> Iterator[tuple[Path, ChildRuns]]:
    """Yield a folder for what this process adds to the search `run_id` of the store `uri`, and what makes child runs.

    Raises:
        InvalidInputError: the tracking store of this process has no such run, or the folder cannot be written.

    """
    folder = _make_folder(output, "worker")
    try:
        client = connect()
        run = client.get_run(run_id)
    except Exception as error:  # any error of a store, its driver or its network
        folder.rmdir()
        raise InvalidInputError(
            f"a worker needs the tracking store with the run of the search, {run_id}, which is {uri}, and does not "
            f"reach it ({first_line(error)}); start it, or set MLFLOW_TRACKING_URI"
        ) from error
    sender = Sender(client)
    parent = _manifest_of(run, client)
    try:
        yield folder, ChildRuns(parent, sender, "search")
    finally:
        sender.close()


@contextmanager
def open_job(entry: str, subject: str, output: Path, about: Mapping[str, str] | None = None) -> Iterator[Job]:
    """Yield the job's run: the one that `mlflow run` has created, or a new one; it ends FINISHED, FAILED or KILLED.

    Raises:
        InvalidInputError: the tracking store cannot be reached, or the folder `output` cannot be written.

    """
    folder = _make_folder(output, entry)
    try:
        client, run = _adopt_or_create(entry, f"{entry} {subject}")
    except BaseException:  # Ctrl-C too
        folder.rmdir()
        raise
    sender = Sender(client)
    manifest = _manifest_of(run, client)
    sender.do(lambda: send_abandoned(output, manifest.uri, client))
    try:
        job = Job(folder, manifest, sender, entry)
    except BaseException:  # a full disk, or Ctrl-C: no file would tell `sync` about the run
        client.set_terminated(run.info.run_id, "FAILED")
        raise
    status = "FAILED"
    try:
        if about is not None:
            job.file("environment.json", json.dumps(dict(about), indent=1))
        with _system_metrics(run.info.run_id):
            yield job
        status = "FINISHED" if job.succeeded else "FAILED"
    except KeyboardInterrupt:
        status = STATUS[Outcome.INTERRUPTED]
        job.tags({"outcome": Outcome.INTERRUPTED.value})
        raise
    finally:
        try:
            job.end(status)
        finally:
            sender.close()


@contextmanager
def _system_metrics(run_id: str) -> Iterator[None]:
    """Let MLflow log the use of the machine as its own switch says, which it does itself after start_run() alone."""
    if not MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():
        yield
        return
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(run_id)
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()


def _manifest_of(run: MlflowRun, client: MlflowClient) -> Manifest:
    """Return the manifest of a run that MLflow has, which this process sends from now on."""
    return Manifest(
        uri=portable_uri(client.tracking_uri),
        experiment_id=run.info.experiment_id,
        name=run.info.run_name,
        key=run.info.run_id,
        owner=this_process(),
        start_time=run.info.start_time,
        run_id=run.info.run_id,
    )


def _make_folder(output: Path, entry: str) -> Path:
    try:
        folder = output / f"{time.strftime('%Y%m%d-%H%M%S')}-{entry}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)  # with the usual rights: whoever may read the folder above may read the page
        return folder
    except OSError as error:
        raise InvalidInputError(
            f"the output folder must be writable, and {output} is not ({error.strerror}); set output to another"
        ) from error


def _adopt_or_create(entry: str, name: str) -> tuple[MlflowClient, Any]:
    """Return the client and the run: the one that `mlflow run` has created for this job, or a new one."""
    try:
        client = connect()
        given = take_run_of_job()
        if given is None:
            experiment_id = find_or_create(client)
            set_kind(client, experiment_id)
            run = client.create_run(experiment_id, tags={**resolve_tags(), "technique": entry}, run_name=name)
        else:
            run = client.get_run(given)
            set_kind(client, run.info.experiment_id)
            client.set_tag(given, "technique", entry)
            if RANDOM_NAME.fullmatch(run.info.run_name or ""):
                client.set_tag(given, "mlflow.runName", name)
    except InvalidInputError:
        raise
    except Exception as error:  # any error of a store, its driver or its network
        raise unreachable(error) from error
    return client, run
