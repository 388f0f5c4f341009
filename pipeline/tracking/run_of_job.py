"""The run that `mlflow run` has created for a job of Fitproof's; MLflow is not imported for it."""

import os

_kept: list[str] = []
"""Its id while the job has not begun."""


def keep_run_of_job() -> None:
    """Keep the run of MLFLOW_RUN_ID for the job alone: commands that are simulated or searched must not log to it."""
    _kept[:] = filter(None, [os.environ.pop("MLFLOW_RUN_ID", None)])


def take_run_of_job() -> str | None:
    """Return the id of the run, once; None if a job makes a run of its own."""
    return _kept.pop() if _kept else None
