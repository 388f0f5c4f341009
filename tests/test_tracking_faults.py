"""MLflow's server goes away, or a disk is full, during a job: training goes on, and everything arrives once."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlflow import MlflowClient
from processes import started, wait_for
from project import SMALL, Project, as_words, new_store
from servers import MlflowServer
from test_faults import MANY, unsent
from test_sync import history

PATIENT = """
import time
from torch import nn

class Patient(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding, self.head = nn.Embedding(size, 8), nn.Linear(8, size)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    def forward(self, ids):
        time.sleep(0.03)
        return self.head(self.layers(self.embedding(ids)))

def build(size):
    return Patient(size)
"""
"""A model that leaves the processor, and few optimizer steps to send, while the server is away."""
NUM_STEPS = 250
"""Optimizer steps whose metrics are more than MLflow takes in one batch."""


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Make `folder` a disk of this size."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this machine does not let us mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def artifact_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a project whose artifact store is a small disk."""
    with small_disk(Project.copy(tmp_path).folder / "mlruns", "64k") as disk:
        yield disk


def test_results_that_find_the_disk_full_end_the_job_with_a_line(tmp_path: Path) -> None:
    project = Project.copy(tmp_path)
    with small_disk(project.folder / "runs", "48k"):
        done = project.here("main", {**SMALL, "num_steps": "400"})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: the output folder must be writable" in done.stderr
    assert "No space left on device" in done.stderr
    parent, child = project.only_run("main")
    assert (parent.info.status, child.info.status, child.data.metrics["step/loss"] > 0) == ("FAILED", "KILLED", True)


def test_files_that_find_the_disk_full_are_kept_and_sent_once_there_is_room(artifact_disk: Path) -> None:
    project = Project(artifact_disk.parent)
    done = project.here("main", SMALL)
    assert done.returncode == 0 and "s per optimizer step" in done.stdout, done.stderr
    assert "No space left on device" in done.stderr and "fitproof sync" in done.stderr
    parent, child = project.only_run("main")
    assert (parent.info.status, child.info.status, child.data.metrics["step/loss"] > 0) == (
        "FINISHED",
        "FINISHED",
        True,
    )
    full = project.here("sync", {})
    assert full.returncode == 1 and "No space left on device" in full.stdout

    subprocess.run(["mount", "-o", "remount,size=50m", str(artifact_disk)], check=True)
    project.succeed("sync", {})
    [job] = (project.folder / "runs").iterdir()
    for run, folder, names in [
        (parent, job, ("comparison.csv", "environment.json")),
        (child, job / "gpt2-nano", ("config.yaml", "result.json")),
    ]:
        stored = artifact_disk / run.info.experiment_id / run.info.run_id / "artifacts"
        assert [(stored / name).read_bytes() for name in names] == [(folder / name).read_bytes() for name in names]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """Give a running tracking server."""
    folder = tmp_path_factory.mktemp("server")
    server = MlflowServer(folder, new_store(folder))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def project(server: MlflowServer, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Give a project that reports to the server."""
    project = Project.copy(tmp_path_factory.mktemp("project"))
    project.environment |= {
        "MLFLOW_TRACKING_URI": server.address,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "OMP_NUM_THREADS": "1",
    }
    (project.folder / "patient.py").write_text(PATIENT)
    return project


def losses(server: MlflowServer, project: Project) -> list[int]:
    """Return the steps whose loss the newest child run has in the tracking server, in order."""
    client = MlflowClient(server.address)
    children = project.children_of(project.parent_of("main", server.address), server.address)
    return [step for run in children.values() for step, _ in history(client, run).get("step/loss", [])]


def measured_steps(project: Project) -> list[int]:
    """Return the steps that the newest run has on local disk."""
    *_, result = sorted(project.folder.glob("runs/*-main-*/*/result.json"))
    return [step["step"] for step in json.loads(result.read_text())["result"]["steps"]]


@pytest.mark.slow
def test_a_server_that_restarts_during_a_run_misses_nothing(server: MlflowServer, project: Project) -> None:
    settings = {**SMALL, "model": "patient:build", "num_steps": MANY}
    with started(project, "python", "-m", "fitproof", "main", *as_words(settings)) as training:
        wait_for(
            lambda: any("step/loss" in run.data.metrics for run in project.runs(server.address)),
            "the first steps",
            pause=0.5,
        )
        server.stop()
        assert training.stderr is not None
        assert "MLflow did not accept" in training.stderr.readline()
        server.start()
        before = len(losses(server, project))
        wait_for(lambda: len(losses(server, project)) > before, "steps after the restart", pause=0.5)
        os.killpg(training.pid, signal.SIGINT)
        _, err = training.communicate(timeout=120)
    assert "all results have reached MLflow now" in err
    parent, child = project.only_run("main", server.address)
    assert (parent.info.status, child.info.status, child.data.tags["outcome"]) == ("KILLED", "KILLED", "interrupted")
    assert losses(server, project) == measured_steps(project)
    assert not unsent(project)


@pytest.mark.slow
def test_a_server_that_is_away_and_comes_back_gets_everything_once(server: MlflowServer, project: Project) -> None:
    num_before = len(project.runs(server.address))
    settings = {**SMALL, "model": "patient:build", "num_steps": str(NUM_STEPS)}
    words = ["python", "-m", "fitproof", "main", *as_words(settings)]
    with started(project, *words) as training:
        wait_for(lambda: len(project.runs(server.address)) == num_before + 2, "the child run", pause=0.3)
        server.stop()
        out, err = training.communicate(timeout=300)
    assert training.returncode == 0 and "s per optimizer step" in out, err
    assert err.count("MLflow did not accept") == 1 and "the job continues" in err
    assert "send it with: fitproof sync" in err
    assert len(measured_steps(project)) == NUM_STEPS
    away = project.here("sync", {})
    assert away.returncode == 1 and "run sync again when the store is back" in away.stdout
    kept = {file: file.read_bytes() for file in unsent(project)}
    assert len(kept) == 2

    server.start()
    two = [project.popen("python", "-m", "fitproof", "sync") for _ in range(2)]
    said = [process.communicate(timeout=120) for process in two]
    assert [process.returncode for process in two] == [0, 0], said
    assert not unsent(project)
    parent, child = project.only_run("main", server.address)
    assert (parent.info.status, child.info.status, child.data.tags["outcome"]) == ("FINISHED", "FINISHED", "ok")
    assert losses(server, project) == list(range(NUM_STEPS))

    for file, content in kept.items():
        file.write_bytes(content)
    assert project.here("sync", {}).returncode == 0
    assert losses(server, project) == list(range(NUM_STEPS)) and len(project.runs(server.address)) == num_before + 2
