"""What one run has to tell MLflow, kept until it has arrived; telling it twice leaves MLflow as telling it once.

MLflow's SQL store ignores a metric with the time, step and value of one that it has, and a dataset that the run has
(SqlAlchemyStore._log_metrics_once, _log_inputs_impl); params, tags, files and the end overwrite themselves; a run is
looked for by its key before it is created.
"""

import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Self

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from pipeline.base.errors import InvalidInputError
from pipeline.tracking.journal import KINDS, Contents, Journal, Record, Start

KEY = "headroom.key"
"""The tag that tells a run from every other before MLflow has given it an id."""
METRICS_IN_A_BATCH = 1000
"""The most that MLflow's log_batch takes at once."""


class Outbox:
    """The records of one run that have not arrived; others may add to it while one thread sends."""

    def __init__(self, journal: Journal, start: Start, contents: Contents) -> None:
        self._journal, self._start = journal, start
        self.run_id = start.run_id
        """MLflow's id; None as long as MLflow does not know the run."""
        self._waiting = {number: r for number, r in sorted(contents.records.items()) if number not in contents.sent}
        self._next = max(contents.records, default=-1) + 1
        self._ended = contents.status is not None
        self._keep = bool(contents.damaged)

    @classmethod
    def begin(cls, folder: Path, start: Start) -> Self:
        """Begin the outbox of a new run.

        Raises:
            InvalidInputError: the folder cannot be written.

        """
        try:
            return cls(Journal.create(folder, start), start, Contents())
        except OSError as error:
            raise unwritable(folder, error) from error

    @property
    def done(self) -> bool:
        """Whether the run has ended, and all of it has arrived."""
        return self._ended and not self._waiting

    @property
    def folder(self) -> Path:
        """The folder of the run's files."""
        return self._journal.path.parent

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, kind: str, **data: Any) -> None:
        """Keep something to tell MLflow: on disk first, then in memory."""
        record = Record(self._next, kind, data)
        self._journal.add(record)
        self._next += 1
        self._waiting[record.number] = record
        self._ended = self._ended or kind == "end"

    def send(self, client: MlflowClient) -> Exception | None:
        """Send what can be sent, and return what hindered the rest; files may fail where the others do not."""
        trouble: Exception | None = None
        stuck: set[bool] = set()
        try:
            run_id = self.run_id or self._create(client)
        except Exception as error:  # whatever a store, its driver or its network raises
            return error
        for records in _batches(self._waiting.copy().values()):
            of_files = records[0].kind == "file"
            if of_files in stuck:
                continue
            try:
                _tell(client, run_id, self.folder, records)
            except Exception as error:  # as above
                trouble = error
                if not is_refusal(error):
                    stuck.add(of_files)
                continue
            numbers = [record.number for record in records]
            self._journal.arrived(numbers)
            for number in numbers:
                del self._waiting[number]
        return trouble

    def close(self) -> bool:
        """Let go of it; return whether all has arrived, so that no journal stays on disk."""
        complete = self.done and not self._keep
        self._journal.close(remove=complete)
        return complete

    def _create(self, client: MlflowClient) -> str:
        """Create the run in MLflow, unless an attempt whose answer was lost has; return its id."""
        start = self._start
        if not self._find(client):
            client.create_run(start.experiment_id, start.time, {**start.tags, KEY: start.key}, start.name)
        run_id, *doubles = self._find(client)  # MLflow's own retries may have created it twice
        for double in doubles:
            client.delete_run(double)
        self.run_id = run_id
        self._journal.created(run_id)
        return run_id

    def _find(self, client: MlflowClient) -> list[str]:
        runs = client.search_runs([self._start.experiment_id], f"tags.`{KEY}` = '{self._start.key}'")
        return sorted(run.info.run_id for run in runs)


def now() -> int:
    """Return the time as MLflow counts it: milliseconds since 1970."""
    return int(time.time() * 1000)


def unwritable(path: Path, error: OSError) -> InvalidInputError:
    """Return the error of a result that cannot be put on disk."""
    return InvalidInputError(
        f"the output folder must take the results, and {path} cannot be written ({error.strerror}); make room, or set "
        "output to another folder"
    )


def is_refusal(error: Exception) -> bool:
    """Whether MLflow was reached and never will have this: a wrong value, or a run that is no more."""
    return isinstance(error, MlflowException) and error.get_http_status_code() in (400, 404)


def _batches(records: Collection[Record]) -> Iterator[list[Record]]:
    """Yield the records in the order of KINDS, metrics as many together as MLflow takes."""
    batch: list[Record] = []
    size = 0
    for record in sorted(records, key=lambda record: (KINDS.index(record.kind), record.number)):
        num_values = len(record.data.get("values", ()))
        together = bool(batch) and batch[0].kind == record.kind == "metrics"
        if batch and not (together and size + num_values <= METRICS_IN_A_BATCH):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += num_values
    if batch:
        yield batch


def _tell(client: MlflowClient, run_id: str, folder: Path, records: list[Record]) -> None:
    """Make the one call that tells MLflow these records."""
    data = records[0].data
    match records[0].kind:
        case "metrics":
            rows = [(record.data, name, value) for record in records for name, value in record.data["values"].items()]
            client.log_batch(run_id, metrics=[Metric(name, value, d["time"], d["step"]) for d, name, value in rows])
        case "params":
            client.log_batch(run_id, params=[Param(name, value) for name, value in data["values"].items()])
        case "tags":
            client.log_batch(run_id, tags=[RunTag(name, value) for name, value in data["values"].items()])
        case "dataset":
            entity = Dataset(data["name"], data["digest"], "local", data["source"], profile=data["profile"])
            client.log_inputs(run_id, [DatasetInput(entity, [InputTag("mlflow.data.context", "training")])])
        case "file":
            client.log_artifact(run_id, str(folder / data["name"]), data["artifact_path"])
        case "end":
            client.set_terminated(run_id, data["status"], data["time"])
