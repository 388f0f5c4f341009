"""Faults of a search with several workers: of a Ray cluster, its driver, PostgreSQL, the tracking server, a network."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import optuna
import psutil
import pytest
from mlflow import MlflowClient
from optuna.trial import FrozenTrial, TrialState
from processes import started, wait_for, wait_for_the_end
from project import SMALL, Project, as_words, parent_id
from ray_cluster import RayCluster, running_ray
from servers import MlflowServer, Postgresql
from test_tracking_faults import PATIENT

from pipeline.searching.storage import open_storage

pytestmark = pytest.mark.slow
SECONDS_AWAY = 20
NUM_TRIALS = 6
SEARCH = {
    **SMALL,
    "model": "patient:build",
    "num_steps": "100",
    "precision_percent": "0.001",
    "effective_batch_size": "8",
    "budget": "1GiB",
    "num_trials": str(NUM_TRIALS),
    "sampler": "tpe",
    "verify_steps": "0",
    "worker_timeout": "8",
    "study": "faults",
    "workers": "2",
    "space": json.dumps({"micro_batch_size": [4, 8], "checkpointing": ["none", "every_layer", "every_2_layers"]}),
}
"""Trials of some seconds, which mostly sleep."""


@dataclass
class Setting:
    """A project whose study and whose runs are in PostgreSQL."""

    project: Project
    postgresql: Postgresql
    server: MlflowServer
    url: str

    @property
    def trials(self) -> list[FrozenTrial]:
        """Every trial of the study, none where there is no study yet."""
        storage = open_storage(self.url)
        names = [study.study_name for study in storage.get_all_studies()]
        return optuna.load_study(storage=storage, study_name="faults").trials if "faults" in names else []

    def count(self, state: TrialState) -> int:
        """Return the number of trials in this state."""
        return sum(trial.state is state for trial in self.trials)

    def words(self, **settings: str) -> list[str]:
        """Return the command of a search."""
        return ["python", "-m", "pipeline", "search", *as_words({**SEARCH, "storage": self.url, **settings})]

    def check(self) -> None:
        """Check that each configuration was measured once, nothing is unfinished, and the answer is the study's."""
        trials = self.trials
        assert all(trial.state.is_finished() for trial in trials)
        measured = [trial for trial in trials if trial.state is TrialState.COMPLETE]
        assert len(measured) == NUM_TRIALS
        assert set(Counter(tuple(sorted(trial.params.items())) for trial in measured).values()) == {1}
        assert not [t for t in trials if t.user_attrs.get("outcome") == "crashed"], "no configuration is to blame"
        best = max(measured, key=lambda trial: trial.values[0])
        runs = self.project.runs(self.server.address)
        assert {run.info.status for run in runs} <= {"FINISHED", "KILLED"}, [r.info.status for r in runs]
        ok = [run for run in runs if parent_id(run) and run.data.tags["outcome"] == "ok"]
        assert {int(run.data.tags["trial"]) - 1 for run in ok} >= {trial.number for trial in measured}
        config = (self.project.folder / "best.yaml").read_text()
        assert all(str(value) in config for value in best.params.values())


@pytest.fixture(scope="module")
def server(postgresql: Postgresql, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """Give a tracking server that keeps its runs in PostgreSQL."""
    store = postgresql.url(postgresql.new_database())
    server = MlflowServer(tmp_path_factory.mktemp("server"), store, environment=postgresql.environment)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def setting(
    tmp_path: Path, server: MlflowServer, postgresql: Postgresql, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Setting]:
    """Give a project with a study of its own, whose runs are in an experiment of its own."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for name, value in postgresql.environment.items():
        monkeypatch.setenv(name, value)
    project = Project.copy(tmp_path, with_store=False)
    project.environment |= {"MLFLOW_TRACKING_URI": server.address, "OMP_NUM_THREADS": "1"}
    (project.folder / "patient.py").write_text(PATIENT)
    yield Setting(project, postgresql, server, postgresql.url(postgresql.new_database()))
    client = MlflowClient(server.address)
    for run in project.runs(server.address):
        client.delete_run(run.info.run_id)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Give a Ray cluster of two raylets."""
    with running_ray(2) as nodes:
        yield nodes


def test_a_ray_worker_and_a_raylet_that_are_killed_lose_no_trial(setting: Setting, cluster: RayCluster) -> None:
    setting.project.environment |= cluster.environment
    words = setting.words(executor="ray", ray_address=cluster.address)
    with started(setting.project, *words) as search:
        wait_for(lambda: setting.count(TrialState.COMPLETE) >= 1 and bool(cluster.tasks), "a trial")
        cluster.tasks[0].kill()
        wait_for(lambda: setting.count(TrialState.FAIL) >= 1, "the loss of the first trial", seconds=60)
        raylet = cluster.raylets[-1]
        raylet.kill()
        cluster.add_node()
        out, err = search.communicate(timeout=300)
    assert search.returncode == 0, err
    assert out.count("its worker died; it is measured again") >= 1, out
    setting.check()
    wait_for(lambda: not cluster.tasks, "the end of the tasks", seconds=30)


def test_postgresql_and_the_tracking_server_that_are_away_lose_no_trial(setting: Setting) -> None:
    with started(setting.project, *setting.words()) as search:
        wait_for(lambda: setting.count(TrialState.COMPLETE) >= 1, "a trial")
        setting.postgresql.stop()
        time.sleep(SECONDS_AWAY)
        setting.postgresql.start()
        wait_for(lambda: setting.count(TrialState.COMPLETE) >= 2, "another trial")
        setting.server.stop()
        time.sleep(3)
        setting.server.start()
        out, err = search.communicate(timeout=300)
    assert search.returncode == 0 and "Traceback" not in err, err
    assert "its worker died" not in out, "a living worker lost its trial"
    setting.project.call("python", "-m", "pipeline", "sync")
    setting.check()


def test_a_driver_that_is_killed_and_started_twice_at_once_loses_no_trial(setting: Setting) -> None:
    with started(setting.project, *setting.words()) as search:
        wait_for(lambda: setting.count(TrialState.RUNNING) == 2 and setting.count(TrialState.COMPLETE) >= 1, "trials")
        family = [psutil.Process(search.pid), *psutil.Process(search.pid).children(recursive=True)]
        search.kill()
    wait_for_the_end(family)
    two = [setting.project.popen(*setting.words()) for _ in range(2)]
    said = [search.communicate(timeout=300) for search in two]
    assert [search.returncode for search in two] == [0, 0], said
    setting.check()


def test_a_worker_that_joined_and_was_killed_loses_no_trial(setting: Setting) -> None:
    words = setting.words(num_steps="600")  # the worker takes a while to start
    joins = ["python", "-m", "pipeline", "worker", "--study", "faults", "--storage", setting.url, "--workers", "2"]
    with started(setting.project, *words) as search:
        wait_for(lambda: setting.count(TrialState.RUNNING) == 2, "the search")
        with started(setting.project, *joins) as worker:
            wait_for(lambda: setting.count(TrialState.RUNNING) > 2 or search.poll() is not None, "the worker")
            worker.kill()
        out, err = search.communicate(timeout=300)
    assert search.returncode == 0, err
    assert "its worker died; it is measured again" in out
    setting.check()


def test_ctrl_c_of_two_workers_ends_within_seconds_and_the_same_command_resumes(setting: Setting) -> None:
    with started(setting.project, *setting.words()) as search:
        wait_for(lambda: setting.count(TrialState.RUNNING) == 2 and setting.count(TrialState.COMPLETE) >= 1, "trials")
        family = psutil.Process(search.pid).children(recursive=True)
        os.killpg(search.pid, signal.SIGINT)
        _, err = search.communicate(timeout=60)
    assert search.returncode == 130 and "Traceback" not in err, err
    wait_for_the_end(family)
    assert setting.count(TrialState.RUNNING) == 0
    assert {run.info.status for run in setting.project.runs(setting.server.address)} <= {"FINISHED", "KILLED"}
    again = setting.project.call(*setting.words())
    assert again.returncode == 0, again.stderr
    setting.check()
