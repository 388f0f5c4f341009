"""Jobs that start at the same moment share one MLflow experiment."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from project import new_store

from pipeline.base.errors import InvalidInputError
from pipeline.tracking import experiment

NUM_JOBS = 6


def test_jobs_find_and_mark_an_experiment_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = new_store(tmp_path)
    together = Barrier(NUM_JOBS, timeout=30)

    def start(_: int) -> str:
        client = MlflowClient(uri)
        together.wait()
        experiment_id = experiment.find_or_create(client)
        together.wait()
        experiment.set_kind(client, experiment_id)
        return experiment_id

    with ThreadPoolExecutor(NUM_JOBS) as jobs:
        for attempt in range(10):
            monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", f"attempt {attempt}")
            [experiment_id] = set(jobs.map(start, range(NUM_JOBS)))
            tags = MlflowClient(uri).get_experiment(experiment_id).tags
            assert tags[experiment.KIND] == "custom_model_development"


def test_an_experiment_that_cannot_be_marked_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(new_store(tmp_path))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "deleted")
    experiment_id = experiment.find_or_create(client)
    client.delete_experiment(experiment_id)
    with pytest.raises(MlflowException, match="active"):
        experiment.set_kind(client, experiment_id)


def test_the_experiment_that_mlflow_names_by_its_id_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(new_store(tmp_path))
    mine = client.create_experiment("mine")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", mine)  # `mlflow run` sets it
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another")
    assert experiment.find_or_create(client) == mine


def test_a_deleted_experiment_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(new_store(tmp_path))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "gone")
    experiment_id = experiment.find_or_create(client)
    client.delete_experiment(experiment_id)
    with pytest.raises(InvalidInputError, match=f"gone is: mlflow experiments restore --experiment-id {experiment_id}"):
        experiment.find_or_create(client)
