"""The MLflow experiment of a job, which another job may be creating or changing at the same moment."""

import os

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage
from mlflow.exceptions import MlflowException

from pipeline.base.errors import InvalidInputError

KIND = "mlflow.experimentKind"


def find_or_create(client: MlflowClient) -> str:
    """Return the id of the experiment that MLFLOW_EXPERIMENT_ID or MLFLOW_EXPERIMENT_NAME names, else of `fitproof`.

    Raises:
        InvalidInputError: it was deleted.

    """
    name, given = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fitproof"), os.environ.get("MLFLOW_EXPERIMENT_ID")
    known = client.get_experiment(given) if given else client.get_experiment_by_name(name)
    if known is not None and known.lifecycle_stage == LifecycleStage.DELETED:
        raise InvalidInputError(
            f"runs need an experiment that is not deleted, and {known.name} is: mlflow experiments restore "
            f"--experiment-id {known.experiment_id}, or set MLFLOW_EXPERIMENT_NAME to another"
        )
    if known is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another job was first
            known = client.get_experiment_by_name(name)
            if known is None:
                raise
    return str(known.experiment_id)


def set_kind(client: MlflowClient, experiment_id: str) -> None:
    """Let MLflow's pages show the experiment as one of training rather than of language model applications."""
    if KIND not in client.get_experiment(experiment_id).tags:
        try:
            client.set_experiment_tag(experiment_id, KIND, "custom_model_development")
        except MlflowException:  # another job was first: MLflow's database refuses a second row of the same tag
            if KIND not in client.get_experiment(experiment_id).tags:
                raise
