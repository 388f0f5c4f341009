"""MLflow's own measurements of the machine, of a job for which its switch is on."""

from pathlib import Path

import pytest
from mlflow import MlflowClient
from processes import wait_for
from project import new_store

from pipeline.tracking.job import open_job

PROCESSORS = "system/cpu_utilization_percentage"


def test_mlflow_measures_the_machine_of_a_job_where_its_switch_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path))
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    found = {}
    for switch in ("true", "false"):
        monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", switch)
        client = MlflowClient()
        with open_job("main", "gpt2-nano", tmp_path / "runs") as job:
            run_id = str(job.manifest.run_id)
            if switch == "true":
                wait_for(lambda: PROCESSORS in client.get_run(run_id).data.metrics, "its metrics")  # noqa: B023
        found[switch] = client.get_run(run_id)
    assert all(run.info.status == "FINISHED" for run in found.values())
    assert PROCESSORS in found["true"].data.metrics
    assert not found["false"].data.metrics
