"""A job and its variants as MLflow runs: the run that `mlflow run` opened (or a new one) is the parent of all."""

import json
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.tracking import get_tracking_uri
from mlflow.tracking.context.registry import resolve_tags

from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome, Result, StepRecord
from pipeline.config.experiment import Experiment
from pipeline.runtime.environment import environment
from pipeline.runtime.run import execute
from pipeline.runtime.signals import stop_in_order
from pipeline.tracking.journal import Start, known_ends
from pipeline.tracking.orphans import STATUS, end_orphans, owner_tag
from pipeline.tracking.outbox import Outbox, now
from pipeline.tracking.run import Run
from pipeline.tracking.store import Store, lasting, try_database, unreachable
from pipeline.training.metrics import Summary, finite, step_metrics

Figures = Callable[[Result], Summary]
Measure = Callable[[Experiment, Path, Callable[[StepRecord], None]], Result]
"""Runs an experiment; its output goes to a file, and it tells each optimizer step."""


class ParentRun(Run):
    """The run of a whole job."""

    def __init__(self, store: Store, outbox: Outbox, start: Start, entry: str, known_params: Collection[str]) -> None:
        super().__init__(store, outbox)
        self._start, self._entry, self._known_params = start, entry, known_params
        self.succeeded = True
        """Whether the run ends FINISHED; a job that completed nothing sets it to False."""

    def params(self, params: Mapping[str, Any]) -> None:
        """Log params; those that `mlflow run` has written already stay as they are, since MLflow never changes one."""
        super().params({name: value for name, value in params.items() if name not in self._known_params})

    def describe(self, question: str, answer: str, description: str) -> None:
        """Say what the job asked and found: as tags, and as the Markdown that MLflow shows with the run."""
        self.tags({"question": question, "answer": answer[:TAG_CHARACTERS], "mlflow.note.content": description})

    def run(
        self,
        name: str,
        experiment: Experiment,
        metrics: Figures,
        tags: Mapping[str, str],
        on_step: Callable[[StepRecord], None] = lambda record: None,
        measure: Measure = execute,
    ) -> tuple[Result, dict[str, float]]:
        """Train `experiment` in a fresh process as a child run; return the result and its summary by `figures`.

        What `measure` leaves in the folder `traces` beside its log becomes artifacts. Ctrl-C marks the child KILLED,
        keeps what was measured, and goes on as KeyboardInterrupt.
        """
        child = self._child(name, experiment, tags)

        def receive(record: StepRecord) -> None:
            child.metrics(step_metrics(record), step=record.step)
            on_step(record)

        try:
            child.params(experiment.params())
            child.dataset(experiment.prepare(), experiment.settings.corpus)
            child.file("config.yaml", experiment.to_yaml())
            result = measure(experiment, child.folder / "log.txt", receive)
            summary = metrics(result)
            _keep(child, experiment, result, summary)
        except BaseException:
            child.end(STATUS[Outcome.INTERRUPTED])
            raise
        child.end(STATUS[result.outcome])
        if result.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        return result, dict(summary.metrics)

    def _child(self, name: str, experiment: Experiment, tags: Mapping[str, str]) -> Run:
        folder = self.folder / name.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        about = environment(experiment.device)
        labels = {
            **resolve_tags(),
            "mlflow.parentRunId": str(self.run_id),
            **owner_tag(),
            "technique": self._entry,
            "device": str(experiment.device),
            **{key: value for key, value in about.items() if key in RUN_TAGS},
            **tags,
        }
        start = replace(self._start, name=name, tags=labels, time=now(), key=uuid.uuid4().hex, run_id=None)
        return Run(self._store, Outbox.begin(folder, start))


TAG_CHARACTERS = 5000
"""The longest tag that every MLflow store takes."""
RANDOM_NAME = re.compile(r"[a-z]+-[a-z]+-\d+")
"""The form of the names that MLflow invents, such as merciful-smelt-439."""
RUN_TAGS = ("device_name", "git_commit", "torch", "transformers", "cuda", "allocator")
"""What of the environment is a tag of each run."""


@contextmanager
def open_parent(entry: str, subject: str, output: Path) -> Iterator[ParentRun]:
    """Give the run that `mlflow run` has opened, or a new one; it ends FINISHED, FAILED (on an error) or KILLED.

    Raises:
        InvalidInputError: the tracking store cannot be reached, or the folder `output` cannot be written.

    """
    stop_in_order()
    folder = _make_folder(output, entry)
    try:
        client, run = _adopt_or_create(entry, f"{entry} {subject}")
    except InvalidInputError:
        folder.rmdir()
        raise
    store = Store(client)
    info = run.info
    store.do(lambda client: end_orphans(client, info.experiment_id, known_ends(output)))
    start = Start(
        uri=lasting(client.tracking_uri),
        experiment_id=info.experiment_id,
        name=info.run_name,
        tags={},
        time=info.start_time,
        key=info.run_id,
        run_id=info.run_id,
    )
    parent = ParentRun(store, Outbox.begin(folder, start), start, entry, set(run.data.params))
    status = "FAILED"
    try:
        yield parent
        status = "FINISHED" if parent.succeeded else "FAILED"
    except KeyboardInterrupt:
        status = STATUS[Outcome.INTERRUPTED]
        parent.tags({"outcome": Outcome.INTERRUPTED.value})
        raise
    finally:
        parent.end(status)
        store.close()


def _make_folder(output: Path, entry: str) -> Path:
    """Return a new folder for the files of a job."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{time.strftime('%Y%m%d-%H%M%S')}-{entry}-", dir=output))
    except OSError as error:
        raise InvalidInputError(
            f"the output folder must be writable, and {output} is not ({error.strerror}); set output to another"
        ) from error


def _adopt_or_create(entry: str, name: str) -> tuple[MlflowClient, Any]:
    """Return the client and the run; MLFLOW_RUN_ID names the one that `mlflow run` has opened for us."""
    try:
        try_database(get_tracking_uri())
        client = MlflowClient()
        given = os.environ.pop("MLFLOW_RUN_ID", None)
        if given:
            run = client.get_run(given)
        else:
            run = client.create_run(_experiment_id(client), tags=resolve_tags(), run_name=name)
        client.set_experiment_tag(run.info.experiment_id, "mlflow.experimentKind", "custom_model_development")
        for key, value in {**owner_tag(), "technique": entry}.items():
            client.set_tag(run.info.run_id, key, value)
        if RANDOM_NAME.fullmatch(run.info.run_name or ""):
            client.set_tag(run.info.run_id, "mlflow.runName", name)
    except Exception as error:  # whatever a store, its driver or its network raises
        raise unreachable(error) from error
    return client, run


def _experiment_id(client: MlflowClient) -> str:
    """Return the id of the experiment, which another job may be making at the same moment."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "headroom")
    known = client.get_experiment_by_name(name)
    if known is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            known = client.get_experiment_by_name(name)
            if known is None:
                raise
    return str(known.experiment_id)


def _keep(child: Run, experiment: Experiment, result: Result, summary: Summary) -> None:
    """Put what was measured on disk and into MLflow."""
    child.file("result.json", _to_json(experiment, result, summary.metrics))
    child.metrics(summary.metrics, step=len(result.steps))
    child.tags({"outcome": result.outcome.value, **({"outcome_detail": result.detail} if result.detail else {})})
    child.tags({name: text[:TAG_CHARACTERS] for name, text in summary.tags.items()})
    for trace in sorted(child.folder.glob("traces/*")):
        child.existing_file(f"traces/{trace.name}", "traces")
    log = child.folder / "log.txt"
    if result.outcome in (Outcome.CRASHED, Outcome.OUT_OF_MEMORY) and log.exists():
        child.file("log.txt", log.read_bytes())


def _to_json(experiment: Experiment, result: Result, metrics: Mapping[str, float]) -> str:
    return json.dumps(finite({"settings": experiment.params(), "metrics": metrics, "result": asdict(result)}), indent=1)
