"""The run that `mlflow run` has created for a job of Fitproof's; MLflow is not imported for it."""

import os

RUN = "FITPROOF_RUN_ID"
"""Variable that has its id while the job has not begun."""


def keep_run_of_job() -> None:
    """Keep the run of MLFLOW_RUN_ID for the job alone: commands that are simulated or searched must not log to it."""
    if run_id := os.environ.pop("MLFLOW_RUN_ID", None):
        os.environ[RUN] = run_id
