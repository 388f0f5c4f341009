"""One MLflow run as files: `unsent.json` holds what is left to send, `steps.jsonl` each optimizer step.

Sending is idempotent. MLflow's SQL store ignores a metric whose time, step and value it has, and a dataset that the run
has (SqlAlchemyStore._log_metrics_once, _log_inputs_impl); tags, artifacts and the end overwrite themselves; params that
the run has are left out; a run is looked up by its key before it is created. So a run that was sent in part, or twice,
ends up as if it had been sent once, and `unsent.json` exists exactly as long as something of the run has not arrived.
"""

import json
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

from pipeline.runtime.run_folder import STEPS, read_steps, write_result_file
from pipeline.tracking.metric_names import STEP, summary_points
from pipeline.tracking.store import is_refusal

Item = TypeVar("Item")
Part = tuple[Hashable, ...]
"""What identifies a piece of a run that is sent with one call."""

NAME = "unsent.json"
KEY = "fitproof.key"
"""The tag that identifies a run before MLflow has given it an id."""
ARTIFACT = "artifact"
"""What the identity of a file begins with."""
METRICS_IN_A_BATCH, PAIRS_IN_A_BATCH = 1000, 100
"""The most metrics, and the most params or tags, that MLflow's log_batch takes at once."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `unsent.json`: a run without its optimizer steps; times are in milliseconds since 1970."""

    uri: str
    """The tracking store, without a password."""
    experiment_id: str
    name: str
    key: str
    owner: Mapping[str, Any] | None
    """The process that sends the run; None once it has stopped trying."""
    start_time: int
    run_id: str | None = None
    """None until MLflow has created the run."""
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    dataset: Mapping[str, str] | None = None
    metrics: tuple[Mapping[str, Any], ...] = ()
    """Summary metrics: `values` by name, and `time`."""
    artifacts: tuple[tuple[str, str | None], ...] = ()
    """Files of the folder, each with its folder among the run's artifacts."""
    status: str | None = None
    """MLflow's status at the end; None while the run is running."""
    end_time: int | None = None


class UnsentRun:
    """A run's folder and manifest. One thread may update it while another sends it."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._lock = threading.Lock()
        self._sent: set[Part] = set()
        self._steps_end = 0
        """Byte of steps.jsonl up to which the steps have arrived."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the manifest that a process has left.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no manifest.

        """
        try:
            values = json.loads(path.read_bytes())
            values["metrics"] = tuple(values["metrics"])
            values["artifacts"] = tuple((name, folder) for name, folder in values["artifacts"])
            return cls(path.parent, Manifest(**values))
        except (TypeError, KeyError) as error:
            raise ValueError(str(error)) from error

    def update(self, **changes: Any) -> None:
        """Replace fields of the manifest, and write it.

        Raises:
            InvalidInputError: the folder cannot be written.

        """
        with self._lock:
            self.manifest = replace(self.manifest, **changes)
            write_result_file(self.folder / NAME, json.dumps(asdict(self.manifest), indent=1))

    def send(self, client: MlflowClient) -> Exception | None:
        """Send what has not been sent, and return the first error; the other parts are sent nevertheless.

        The manifest is deleted once the run has ended and all of it has arrived.
        """
        try:
            run_id = self.manifest.run_id or self._create_run(client)
            parts = list(self._left(client, run_id))
        except Exception as error:  # any error of a store, its driver or its network
            return error
        first_error: Exception | None = None
        failing: set[bool] = set()
        for part, send in parts:
            is_artifact = part[0] == ARTIFACT  # which may be kept in another store than all else
            if is_artifact in failing:
                continue
            try:
                send()
            except Exception as error:  # as above
                first_error = first_error or error
                if not is_refusal(error):
                    failing.add(is_artifact)
            else:
                self._sent.add(part)
        with self._lock:  # nothing is added between the look and the deletion
            if first_error is None and self.manifest.status is not None and not list(self._left(client, run_id)):
                (self.folder / NAME).unlink(missing_ok=True)
        return first_error

    @property
    def is_sent(self) -> bool:
        """Whether the run has ended and all of it has arrived."""
        return not (self.folder / NAME).exists()

    def _left(self, client: MlflowClient, run_id: str) -> Iterator[tuple[Part, Callable[[], object]]]:
        """Yield the parts that have not been sent, with the call that sends each."""
        return (one for one in self._parts(client, run_id) if one[0] not in self._sent)

    def _parts(self, client: MlflowClient, run_id: str) -> Iterator[tuple[Part, Callable[[], object]]]:
        """Yield all parts, each with the call that sends it; the end comes after artifacts, which may be refused."""
        manifest, log = self.manifest, partial(client.log_batch, run_id)
        if manifest.params:
            yield ("params", *manifest.params.items()), partial(self._send_params, client, run_id, manifest.params)
        for pairs in _batches(manifest.tags.items(), PAIRS_IN_A_BATCH):
            yield ("tags", *pairs), partial(log, tags=[RunTag(name, value) for name, value in pairs])
        if (about := manifest.dataset) is not None:
            entity = Dataset(about["name"], about["digest"], "local", about["source"], profile=about["profile"])
            inputs = [DatasetInput(entity, [InputTag("mlflow.data.context", "training")])]
            yield ("dataset",), partial(client.log_inputs, run_id, inputs)
        steps, end = read_steps(self.folder / STEPS, self._steps_end)
        if steps:
            yield ("steps", end), partial(self._send_steps, client, run_id, steps, end)
        for number, line in enumerate(manifest.metrics):
            points = summary_points(line["values"])
            yield ("metrics", number), partial(log, metrics=[Metric(k, v, line["time"], step) for k, v, step in points])
        for name, folder in manifest.artifacts:
            yield (ARTIFACT, name), partial(client.log_artifact, run_id, str(self.folder / name), folder)
        if manifest.status is not None:
            ended = partial(client.set_terminated, run_id, manifest.status, manifest.end_time)
            yield ("end", manifest.status), ended

    def _send_params(self, client: MlflowClient, run_id: str, params: Mapping[str, str]) -> None:
        known = client.get_run(run_id).data.params  # `mlflow run` has logged some, and MLflow never changes a param
        missing = [Param(name, value) for name, value in params.items() if name not in known]
        for batch in _batches(missing, PAIRS_IN_A_BATCH):
            client.log_batch(run_id, params=batch)

    def _send_steps(self, client: MlflowClient, run_id: str, steps: Iterable[Mapping[str, Any]], end: int) -> None:
        metrics = [
            Metric(STEP + name, value, line["time"], line["step"])
            for line in steps
            for name, value in line["values"].items()
        ]
        for batch in _batches(metrics, METRICS_IN_A_BATCH):
            client.log_batch(run_id, metrics=batch)
        self._steps_end = end

    def _create_run(self, client: MlflowClient) -> str:
        """Create the run, unless an earlier attempt without an answer has created it; return its id."""
        manifest = self.manifest
        if not self._find_runs(client):
            tags = {**manifest.tags, KEY: manifest.key}
            client.create_run(manifest.experiment_id, manifest.start_time, tags, manifest.name)
        run_id, *duplicates = self._find_runs(client)  # MLflow's own retries may have created it twice
        for duplicate in duplicates:
            client.delete_run(duplicate)
        self.update(run_id=run_id)
        return run_id

    def _find_runs(self, client: MlflowClient) -> list[str]:
        runs = client.search_runs([self.manifest.experiment_id], f"tags.`{KEY}` = '{self.manifest.key}'")
        return sorted(run.info.run_id for run in runs)


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    rest = list(items)
    return (rest[start : start + size] for start in range(0, len(rest), size))
