"""Ends runs in MLflow whose process can no longer do so, because it or its machine died."""

from contextlib import suppress

from mlflow import MlflowClient

from pipeline.base.results import Outcome
from pipeline.tracking.store import STATUS


def end_lost(client: MlflowClient, experiment_id: str, study_key: str, trial: int) -> None:
    """End the runs of a trial that are still running, as interrupted; a store that cannot be reached is left alone.

    Trials are counted from 0, and their tags from 1.
    """
    running = f"attributes.status = 'RUNNING' and tags.study_key = '{study_key}' and tags.trial = '{trial + 1}'"
    with suppress(Exception):  # any error of a store, its driver or its network
        for run in client.search_runs([experiment_id], running):
            client.set_tag(run.info.run_id, "outcome", Outcome.INTERRUPTED.value)
            client.set_terminated(run.info.run_id, STATUS[Outcome.INTERRUPTED])
