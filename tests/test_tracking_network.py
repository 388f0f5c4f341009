"""The database behind MLflow's server stops, or the network to the server hangs: training goes on, all arrives."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import started, wait_for
from project import SMALL, Project, as_words
from servers import MlflowServer, Postgresql, Proxy, proxy_to
from test_faults import unsent
from test_tracking_faults import PATIENT, losses, measured_steps

NUM_STEPS = 120
SECONDS_AWAY = 20
TIMEOUT = "2"


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[Proxy]:
    """Give a network to the server."""
    with proxy_to(server.port) as network:
        yield network


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Give a project with a model whose steps take a while."""
    project = Project.copy(tmp_path, with_store=False)
    project.environment |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "OMP_NUM_THREADS": "1"}
    (project.folder / "patient.py").write_text(PATIENT)
    return project


WORDS = [
    "python",
    "-m",
    "pipeline",
    "main",
    *as_words({**SMALL, "model": "patient:build", "num_steps": str(NUM_STEPS)}),
]


def num_steps(project: Project) -> int:
    """Return how many optimizer steps the run has on local disk."""
    return sum(file.read_text().count("\n") for file in project.folder.glob("runs/*/*/steps.jsonl"))


def assert_all_arrived(project: Project, server: MlflowServer) -> None:
    parent, child = project.only_run("main", server.address)
    assert (parent.info.status, child.info.status, child.data.tags["outcome"]) == ("FINISHED", "FINISHED", "ok")
    assert losses(server, project) == measured_steps(project) == list(range(NUM_STEPS))
    assert not unsent(project)


@pytest.mark.slow
def test_a_database_that_is_away_during_a_run_misses_nothing(
    project: Project, server: MlflowServer, postgresql: Postgresql
) -> None:
    project.environment["MLFLOW_TRACKING_URI"] = server.address
    with started(project, *WORDS) as training:
        wait_for(lambda: num_steps(project) > 3, "the first steps")
        postgresql.stop()
        before = num_steps(project)
        time.sleep(SECONDS_AWAY)
        assert num_steps(project) > before, "training goes on without the database"
        postgresql.start()
        out, err = training.communicate(timeout=300)
    assert training.returncode == 0 and "s per optimizer step" in out, err
    if unsent(project):  # the run ended while the database was away
        assert "send it with: fitproof sync" in err
        assert project.call("python", "-m", "fitproof", "sync").returncode == 0
    assert_all_arrived(project, server)


@pytest.mark.slow
def test_a_network_that_hangs_does_not_stop_training_and_misses_nothing(
    project: Project, server: MlflowServer, proxy: Proxy
) -> None:
    project.environment |= {
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{proxy.port}",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": TIMEOUT,
    }
    with started(project, *WORDS) as training:
        wait_for(lambda: num_steps(project) > 3, "the first steps")
        proxy.hang()
        out, err = training.communicate(timeout=300)
        assert training.returncode == 0 and "s per optimizer step" in out, err
        assert "send it with: fitproof sync" in err and len(measured_steps(project)) == NUM_STEPS
    assert len(losses(server, project)) < NUM_STEPS and unsent(project)
    proxy.flow()
    assert project.call("python", "-m", "fitproof", "sync").returncode == 0
    assert_all_arrived(project, server)
