"""One job -> MLflow runs: the run that `mlflow run` opened (or a new one) is the parent, each variant a child.

Every result is on local disk before it is sent, and a tracking server that goes away never stops a training.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.contracts import InvalidInputError, Outcome, Prepared, Result, StepRecord
from pipeline.environment import environment
from pipeline.execute import execute
from pipeline.experiment import Experiment
from pipeline.metrics import step_metrics

# An unreachable server is found out within seconds, not minutes; the user's own choice stands.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

import sqlalchemy
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.tracking import get_tracking_uri
from mlflow.tracking.context.registry import resolve_tags

STATUS = {
    Outcome.OK: "FINISHED",
    Outcome.OVER_BUDGET: "FINISHED",
    Outcome.OUT_OF_MEMORY: "FAILED",
    Outcome.DIVERGED: "FAILED",
    Outcome.CRASHED: "FAILED",
    Outcome.TIMED_OUT: "FAILED",
    Outcome.INTERRUPTED: "KILLED",
}
SECONDS_BETWEEN_BATCHES = 5.0
METRICS_IN_A_BATCH = 1000
"""The most that MLflow's log_batch takes at once."""
PARAMS_IN_A_BATCH = 100
"""The most that MLflow's log_batch takes at once."""
SECONDS_BEFORE_RETRY = 30.0
"""How long a server that did not answer is left alone."""

Figures = Callable[[Result], dict[str, float]]
"""Result -> summary metrics."""


class Store:
    """MLflow, from one thread and without exceptions: what cannot be sent is said once and left to the local files."""

    def __init__(self, client: MlflowClient) -> None:
        self.client = client
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tracking")
        self._quiet_until = 0.0
        self.num_lost = 0
        """Calls that did not reach the store."""

    def send(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Make this call in the background, after those before it."""
        self._executor.submit(self._attempt, call, args, kwargs)

    def ask(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any | None:
        """Make this call after those before it and return its answer, None where there is none."""
        return self._executor.submit(self._attempt, call, args, kwargs).result()

    def close(self) -> None:
        """Wait until everything has been sent."""
        self._executor.shutdown(wait=True)

    def _attempt(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
        if time.monotonic() < self._quiet_until:
            self.num_lost += 1
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if not self.num_lost:
                first = (str(error).splitlines() or [type(error).__name__])[0]
                print(  # noqa: T201  to the user
                    f"tracking: MLflow did not take what was sent ({first}); going on, results are on disk",
                    file=sys.stderr,
                )
            self.num_lost += 1
            self._quiet_until = time.monotonic() + SECONDS_BEFORE_RETRY
            return None


class Run:
    """One MLflow run, and the folder of its files on local disk."""

    def __init__(self, store: Store, run_id: str | None, folder: Path) -> None:
        self._store, self._run_id, self.folder = store, run_id, folder
        self._waiting: list[Metric] = []
        self._sent_at = time.monotonic()

    @property
    def run_id(self) -> str | None:
        """MLflow's id; None where the store was away when the run began."""
        return self._run_id

    def params(self, params: Mapping[str, Any]) -> None:
        """Log params; a None is logged as `none`, as it is written on the command line."""
        rows = [Param(name, "none" if value is None else str(value)) for name, value in params.items()]
        for start in range(0, len(rows), PARAMS_IN_A_BATCH):
            self._send("log_batch", params=rows[start : start + PARAMS_IN_A_BATCH])

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        self._send("log_batch", tags=[RunTag(name, value) for name, value in tags.items()])

    def metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Log metrics, together with others, within a few seconds."""
        now = int(time.time() * 1000)
        self._waiting += [Metric(name, value, now, step) for name, value in metrics.items()]
        if time.monotonic() - self._sent_at > SECONDS_BETWEEN_BATCHES:
            self._flush()

    def dataset(self, prepared: Prepared, name: str) -> None:
        """Log the corpus as the run's training data."""
        source = json.dumps({"source": prepared.source})
        entity = Dataset(name, prepared.digest, "local", source, profile=json.dumps({"sequences": len(prepared.train)}))
        self._send("log_inputs", datasets=[DatasetInput(entity, [InputTag("mlflow.data.context", "training")])])

    def file(self, name: str, content: str | bytes, artifact_path: str | None = None) -> None:
        """Write a file into the run's folder, all of it or nothing, and log it as an artifact."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.with_name(path.name + ".part")
        work.write_bytes(content.encode() if isinstance(content, str) else content)
        work.replace(path)
        self._send("log_artifact", str(path), artifact_path)

    def end(self, status: str) -> None:
        """Send what is left and set the run's status."""
        self._flush()
        self._send("set_terminated", status)

    def _flush(self) -> None:
        for start in range(0, len(self._waiting), METRICS_IN_A_BATCH):
            self._send("log_batch", metrics=self._waiting[start : start + METRICS_IN_A_BATCH])
        self._waiting, self._sent_at = [], time.monotonic()

    def _send(self, method: str, *args: Any, **kwargs: Any) -> None:
        if self._run_id is not None:
            self._store.send(getattr(self._store.client, method), self._run_id, *args, **kwargs)


class ParentRun(Run):
    """The run of a whole job."""

    def __init__(self, store: Store, run_id: str, experiment_id: str, folder: Path, entry: str) -> None:
        super().__init__(store, run_id, folder)
        self._experiment_id, self._entry = experiment_id, entry
        self.succeeded = True
        """Whether the run ends FINISHED; a job that completed nothing sets it to False."""
        self._known_params = set(store.client.get_run(run_id).data.params)

    def params(self, params: Mapping[str, Any]) -> None:
        """Log params; those that `mlflow run` has written already stay as they are, since MLflow never changes one."""
        super().params({name: value for name, value in params.items() if name not in self._known_params})

    def run(
        self,
        name: str,
        experiment: Experiment,
        figures: Figures,
        tags: Mapping[str, str],
        on_step: Callable[[StepRecord], None] = lambda record: None,
    ) -> Result:
        """Train `experiment` in a fresh process as a child run called `name`; `figures` gives its summary metrics.

        Ctrl-C marks the child KILLED, keeps what was measured, and goes on as KeyboardInterrupt.
        """
        child = self._child(name, experiment, tags)

        def hear(record: StepRecord) -> None:
            child.metrics(step_metrics(record), step=record.step)
            on_step(record)

        try:
            result = execute(experiment, child.folder / "log.txt", hear)
        except BaseException:
            child.end(STATUS[Outcome.INTERRUPTED])
            raise
        summary = figures(result)
        child.file("result.json", _to_json(experiment, result, summary))
        child.metrics(summary, step=len(result.steps))
        child.tags({"outcome": result.outcome.value, **({"outcome_detail": result.detail} if result.detail else {})})
        if result.outcome in (Outcome.CRASHED, Outcome.OUT_OF_MEMORY):
            child.file("log.txt", (child.folder / "log.txt").read_bytes())
        child.end(STATUS[result.outcome])
        if result.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        return result

    def _child(self, name: str, experiment: Experiment, tags: Mapping[str, str]) -> Run:
        folder = self.folder / name.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        about = environment(experiment.device)
        labels = {
            **resolve_tags(),
            "mlflow.parentRunId": str(self.run_id),
            "technique": self._entry,
            "device": str(experiment.device),
            **{key: value for key, value in about.items() if key in RUN_TAGS},
            **tags,
        }
        created = self._store.ask(self._store.client.create_run, self._experiment_id, tags=labels, run_name=name)
        child = Run(self._store, created.info.run_id if created else None, folder)
        child.params(experiment.params())
        child.dataset(experiment.prepare(), experiment.settings.corpus)
        child.file("config.yaml", experiment.to_yaml())
        return child


RUN_TAGS = ("device_name", "git_commit", "torch", "transformers", "cuda", "allocator")
"""What of the environment is a tag of each run."""


@contextmanager
def open_parent(entry: str, output: Path) -> Iterator[ParentRun]:
    """Give the run that `mlflow run` has opened, or a new one; it ends FINISHED, FAILED (on an error) or KILLED.

    Raises:
        InvalidInputError: the tracking store cannot be reached, or the folder `output` cannot be written.

    """
    folder = _make_folder(output, entry)
    try:
        client, run_id, experiment_id = _adopt_or_create(entry)
    except InvalidInputError:
        folder.rmdir()
        raise
    store = Store(client)
    parent = ParentRun(store, run_id, experiment_id, folder, entry)
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


def _adopt_or_create(entry: str) -> tuple[MlflowClient, str, str]:
    """Return the client, run id and experiment id; MLFLOW_RUN_ID names the run that `mlflow run` has opened for us."""
    try:
        _try_database(get_tracking_uri())
        client = MlflowClient()
        given = os.environ.pop("MLFLOW_RUN_ID", None)
        if given:
            run = client.get_run(given)
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "headroom")
            known = client.get_experiment_by_name(name)
            experiment_id = known.experiment_id if known else client.create_experiment(name)
            run = client.create_run(experiment_id, tags=resolve_tags(), run_name=entry)
        client.set_experiment_tag(run.info.experiment_id, "mlflow.experimentKind", "custom_model_development")
        client.set_tag(run.info.run_id, "technique", entry)
        client.set_tag(run.info.run_id, "mlflow.runName", entry)
    except Exception as error:  # whatever a store, its driver or its network raises
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidInputError(
            f"the tracking store must be reachable, and {get_tracking_uri()} is not ({first}); start it, or set "
            "MLFLOW_TRACKING_URI=sqlite:///mlflow.db"
        ) from error
    return client, run.info.run_id, run.info.experiment_id


def _try_database(uri: str) -> None:
    """Connect once to a store that is a database, which MLflow would try for minutes; raise where that fails."""
    if uri.partition(":")[0].partition("+")[0] in DATABASE_ENGINES:
        url = sqlalchemy.make_url(uri)
        if url.drivername == "sqlite" and url.database:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        sqlalchemy.create_engine(url).connect().close()


def _to_json(experiment: Experiment, result: Result, summary: dict[str, float]) -> str:
    return json.dumps(
        _finite({"settings": experiment.params(), "metrics": summary, "result": asdict(result)}), indent=1
    )


def _finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON does not know, by their names."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
