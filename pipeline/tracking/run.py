"""One MLflow run and the folder of its files on local disk, which are written before anything is sent."""

import json
import time
from collections.abc import Mapping
from typing import Any

from pipeline.base.contracts import Prepared
from pipeline.base.files import write_atomically
from pipeline.tracking.outbox import Outbox, now, unwritable
from pipeline.tracking.store import Store

SECONDS_BETWEEN_BATCHES = 5.0
VALUES_IN_A_BATCH = 100
"""The most params or tags that MLflow's log_batch takes at once."""


class Run:
    """One MLflow run, and the folder of its files on local disk."""

    def __init__(self, store: Store, outbox: Outbox) -> None:
        self._store, self._outbox = store, outbox
        self.folder = outbox.folder
        self._sent_at = time.monotonic()
        store.add(outbox)

    @property
    def run_id(self) -> str | None:
        """MLflow's id; None as long as the store has not created the run."""
        return self._outbox.run_id

    def params(self, params: Mapping[str, Any]) -> None:
        """Log params; a None is logged as `none`, as it is written on the command line."""
        self._send_in_batches("params", {k: "none" if value is None else str(value) for k, value in params.items()})

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        self._send_in_batches("tags", tags)

    def metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Log metrics: on disk now, in MLflow together with others within a few seconds."""
        self._outbox.add("metrics", values=dict(metrics), step=step, time=now())
        if time.monotonic() - self._sent_at > SECONDS_BETWEEN_BATCHES:
            self._sent_at = time.monotonic()
            self._store.send(self._outbox)

    def dataset(self, prepared: Prepared, name: str) -> None:
        """Log the corpus as the run's training data."""
        source = json.dumps({"source": prepared.source})
        profile = json.dumps({"sequences": len(prepared.train)})
        self._send("dataset", name=name, digest=prepared.digest, source=source, profile=profile)

    def file(self, name: str, content: str | bytes, artifact_path: str | None = None) -> None:
        """Write a file into the run's folder, all of it or nothing, and log it as an artifact.

        Raises:
            InvalidInputError: it cannot be written.

        """
        path = self.folder / name
        try:
            write_atomically(path, content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise unwritable(path, error) from error
        self._send("file", name=name, artifact_path=artifact_path)

    def existing_file(self, name: str, artifact_path: str | None = None) -> None:
        """Log a file that is in the run's folder as an artifact."""
        self._send("file", name=name, artifact_path=artifact_path)

    def end(self, status: str) -> None:
        """Send what is left and set the run's status."""
        self._send("end", status=status, time=now())

    def _send_in_batches(self, kind: str, values: Mapping[str, str]) -> None:
        rows = list(values.items())
        for start in range(0, len(rows), VALUES_IN_A_BATCH):
            self._send(kind, values=dict(rows[start : start + VALUES_IN_A_BATCH]))

    def _send(self, kind: str, **data: Any) -> None:
        self._outbox.add(kind, **data)
        self._store.send(self._outbox)
