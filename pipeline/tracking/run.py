"""One MLflow run and the folder of its files on local disk, which are written before anything is sent."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

from pipeline.contracts import Prepared
from pipeline.tracking.store import Store

SECONDS_BETWEEN_BATCHES = 5.0
METRICS_IN_A_BATCH = 1000
"""The most that MLflow's log_batch takes at once."""
PARAMS_IN_A_BATCH = 100
"""The most that MLflow's log_batch takes at once."""


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

    def existing_file(self, path: Path, artifact_path: str | None = None) -> None:
        """Log a file of the run's folder as an artifact."""
        self._send("log_artifact", str(path), artifact_path)

    def end(self, status: str) -> None:
        """Send what is left and set the run's status."""
        self._flush()
        if self._run_id is not None:
            self._store.send_anyway(self._store.client.set_terminated, self._run_id, status)

    def _flush(self) -> None:
        for start in range(0, len(self._waiting), METRICS_IN_A_BATCH):
            self._send("log_batch", metrics=self._waiting[start : start + METRICS_IN_A_BATCH])
        self._waiting, self._sent_at = [], time.monotonic()

    def _send(self, method: str, *args: Any, **kwargs: Any) -> None:
        if self._run_id is not None:
            self._store.send(getattr(self._store.client, method), self._run_id, *args, **kwargs)
