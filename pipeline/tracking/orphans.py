"""Runs that a killed process has left RUNNING: they end as what they are."""

import json
from collections.abc import Mapping

from mlflow import MlflowClient

from pipeline.base.results import Outcome
from pipeline.runtime.ownership import is_gone, this_process

OWNER = "headroom.owner"
"""The tag that says which process a run belongs to."""
STATUS = {
    Outcome.OK: "FINISHED",
    Outcome.OVER_BUDGET: "FINISHED",
    Outcome.OUT_OF_MEMORY: "FAILED",
    Outcome.DIVERGED: "FAILED",
    Outcome.CRASHED: "FAILED",
    Outcome.TIMED_OUT: "FAILED",
    Outcome.INTERRUPTED: "KILLED",
}
"""The MLflow status of a run that ended so."""


def owner_tag() -> dict[str, str]:
    """Return the tag that marks a run as this process's."""
    return {OWNER: json.dumps(this_process())}


def end_orphans(client: MlflowClient, experiment_id: str, ends: Mapping[str, str]) -> None:
    """End the RUNNING runs of this experiment whose process is gone.

    `ends` has the status of those whose end is known on disk; the others have the one of their outcome, which is
    `interrupted` where the process did not come to say.
    """
    for run in client.search_runs([experiment_id], "attributes.status = 'RUNNING'", max_results=1000):
        owner = run.data.tags.get(OWNER)
        if owner is None or not is_gone(json.loads(owner)):
            continue
        status = ends.get(run.info.run_id)
        if status is None:
            outcome = Outcome(run.data.tags.get("outcome", Outcome.INTERRUPTED))
            status = STATUS[outcome]
            client.set_tag(run.info.run_id, "outcome", outcome.value)
        client.set_terminated(run.info.run_id, status)
