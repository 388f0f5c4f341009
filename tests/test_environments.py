"""The project in an environment that MLflow builds from conda.yaml."""

import os
from importlib.metadata import version
from pathlib import Path

import mlflow
import pytest
from mlflow.exceptions import ExecutionException
from project import SMALL, Project


@pytest.mark.slow
def test_mlflow_builds_the_environment_with_uv_and_runs_in_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The build of torch that runs this test is offered to uv too, so that no gigabytes are fetched."""
    project = Project.copy(tmp_path_factory.mktemp("project"))
    project.environment["MLFLOW_ENV_ROOT"] = str(tmp_path_factory.mktemp("envs"))
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    if links:
        project.environment["UV_FIND_LINKS"] = links
    constraint = tmp_path_factory.mktemp("constraint") / "torch.txt"
    constraint.write_text(f"torch=={version('torch')}\n")
    project.environment["UV_CONSTRAINT"] = str(constraint)
    given = [word for name, value in SMALL.items() for word in ("-P", f"{name}={value}")]
    done = project.call("mlflow", "run", ".", "-e", "accumulation", "--env-manager=uv", *given)
    assert done.returncode == 0, done.stderr
    parent = project.parent_of("accumulation")
    assert parent.data.tags["mlflow.project.env"] == "uv"
    assert len(project.children_of(parent)) == 8


def test_without_conda_the_error_names_the_other_managers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Project.copy(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", project.store)
    monkeypatch.setenv("MLFLOW_CONDA_HOME", str(tmp_path / "absent"))
    with pytest.raises(ExecutionException, match="Conda"):
        mlflow.projects.run(str(tmp_path), "accumulation")
