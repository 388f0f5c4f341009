"""The MLflow run that the user's own process logs to; MLflow is not imported for it."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.tracking.metric_names import summary_points


@dataclass(frozen=True)
class ActiveRun:
    """A run that the user's process has begun; metrics arrive even after it has ended, as a Trainer may end it."""

    client: Any
    run_id: str

    def metrics(self, values: Mapping[str, float]) -> None:
        """Log summary metrics, by their names in files."""
        for name, value, step in summary_points(values):
            self.client.log_metric(self.run_id, name, value, step=step)

    def set_killed(self) -> None:
        """End the run as KILLED: its process will be ended, and would leave it RUNNING."""
        self.client.set_terminated(self.run_id, "KILLED")


def active_run(loggers: Iterable[Any] = ()) -> ActiveRun | None:
    """Return the run that is active in this thread, else that of an MLFlowLogger of Lightning; None without either."""
    mlflow = sys.modules.get("mlflow")
    run = None if mlflow is None else mlflow.active_run()
    if mlflow is not None and run is not None:
        return ActiveRun(mlflow.MlflowClient(), run.info.run_id)
    own = (logger for logger in loggers if type(logger).__name__ == "MLFlowLogger")
    return next((ActiveRun(logger.experiment, logger.run_id) for logger in own), None)


def variables_of_another_store(folder: Path) -> dict[str, str]:
    """Return the variables by which a process logs to a store in `folder`, and not to the run of this process."""
    return {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "MLFLOW_RUN_ID": "", "MLFLOW_EXPERIMENT_ID": ""}
