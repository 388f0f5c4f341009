"""The runs of the claims: through the project's own MLflow parent and children, and read back from there."""

import os
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from pipeline.tracking.parent import open_parent

from folklore.claim import Record, described
from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome, Result
from pipeline.config.experiment import Experiment
from pipeline.tracking.sync import sync
from pipeline.training.metrics import Summary, summarize

KEY = "claims.key"
"""The tag that tells a run from all others."""
RUNS_IN_A_PAGE = 1000
STAY = (Outcome.OK, Outcome.OVER_BUDGET, Outcome.OUT_OF_MEMORY, Outcome.DIVERGED)
"""Outcomes that stay; runs that ended otherwise are tried again."""
TOLD = (*STAY, Outcome.CRASHED, Outcome.TIMED_OUT)
"""Outcomes that the table tells."""


class Runs:
    """An MLflow store that keeps the runs of one form of the table."""

    def __init__(self, name: str, folder: Path) -> None:
        """Open the store in `folder`, or make it.

        Raises:
            InvalidInputError: the folder cannot be written.

        """
        self._name, self._jobs = name, folder.resolve() / "jobs"
        require_writable(self._jobs)
        # Where open_parent looks for them.
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder.resolve()}/mlflow.db"
        os.environ["MLFLOW_EXPERIMENT_NAME"] = experiment = f"claims {name}"
        self._client = MlflowClient()
        known = self._client.get_experiment_by_name(experiment)
        artifacts = (folder.resolve() / "artifacts").as_uri()
        self._experiment_id: str = (
            known.experiment_id if known else self._client.create_experiment(experiment, artifacts)
        )

    def known(self) -> set[str]:
        """Return the keys of all runs whose outcome stays; what a killed process could not send is sent first."""
        for report in sync(self._jobs):
            if not report.complete:
                print(report.words)
        return {run.data.tags[KEY] for run in self._ended(STAY)}

    def measure(self, todo: Sequence[tuple[str, Experiment]], deadline: float | None) -> None:
        """Run these as children of one MLflow run; begin none after the deadline on the monotonic clock."""
        with open_parent("claims", self._name, self._jobs) as parent:
            for number, (key, experiment) in enumerate(todo, 1):
                if deadline is not None and time.monotonic() > deadline:
                    print(f"time is over: the same command goes on with the other {len(todo) - number + 1} runs")
                    break
                result, _ = parent.run(f"run-{key}", experiment, partial(metrics, experiment), {KEY: key})
                words = f"{described(experiment.params())}: {result.outcome} in {result.seconds_total:.1f} s"
                print(f"{number} of {len(todo)}: {words}", flush=True)

    def records(self) -> dict[str, Record]:
        """Return every run that the table tells, by its key; of several attempts, the last."""
        last = {run.data.tags[KEY]: run for run in self._ended(TOLD)}
        return {key: self._record(run) for key, run in last.items()}

    def _ended(self, outcomes: Collection[Outcome]) -> Iterator[Run]:
        """Yield the runs with one of these outcomes, oldest first."""
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [self._experiment_id],
                f"tags.`{KEY}` != ''",
                ViewType.ACTIVE_ONLY,
                RUNS_IN_A_PAGE,
                ["attributes.start_time ASC"],
                token,
            )
            yield from (run for run in page if run.data.tags.get("outcome") in outcomes)
            token = page.token
            if not token:
                return

    def _record(self, run: Run) -> Record:
        losses = self._client.get_metric_history(run.info.run_id, "loss")
        return Record(
            outcome=Outcome(run.data.tags["outcome"]),
            detail=run.data.tags.get("outcome_detail"),
            params=run.data.params,
            metrics=run.data.metrics,
            losses=tuple(point.value for point in sorted(losses, key=lambda point: point.step)),
        )


def metrics(experiment: Experiment, result: Result) -> Summary:
    """Return a run's summary, without the prediction, which no claim asks for and a GPU would wait for."""
    return Summary(summarize(result, experiment.effective_batch_size, experiment.settings.timing_warmup_steps))


def require_writable(folder: Path) -> None:
    """Make a folder, and raise InvalidInputError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InvalidInputError(
            f"results must be written to a folder that can be, and {folder} cannot ({error.strerror}); "
            "name another with --folder and --kept"
        ) from error
