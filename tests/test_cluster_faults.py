"""Faults of a search with several workers: of a Ray cluster, its driver, PostgreSQL, the tracking server, a network."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from subprocess import Popen

import optuna
import psutil
import pytest
from mlflow import MlflowClient
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState
from processes import interrupted, processes_with, started, wait_for, wait_for_the_end
from project import SMALL, Project, as_words, parent_id
from ray_cluster import RayCluster, running_ray
from servers import MlflowServer, Postgresql, Proxy

from pipeline.searching.storage import open_storage

pytestmark = pytest.mark.slow
SECONDS_AWAY = 12
"""How long PostgreSQL and the tracking server are away: longer than a worker may store no heartbeat."""
SECONDS_OF_A_HANG = 11
"""How long the network hangs: longer than a worker may store no heartbeat."""
STEPS_BEFORE_A_HOLD = 3
MODEL = f"""
import time
from pathlib import Path
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, hidden):
        time.sleep(0.01)
        return self.linear(hidden)

class Patient(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding, self.head = nn.Embedding(size, 8), nn.Linear(8, size)
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))
        self.num_passes = 0
    def forward(self, ids):
        self.num_passes += 1
        while self.num_passes > {STEPS_BEFORE_A_HOLD} * 8 // len(ids) and Path(HOLD).exists():
            time.sleep(0.05)
        return self.head(self.layers(self.embedding(ids)))

def build(size):
    return Patient(size)
"""
"""A model that mostly sleeps, so that its speed does not depend on the load, and that a file holds in the middle of a
trial. HOLD is added to it."""
SPACE = {"micro_batch_size": [2, 4, 8], "checkpointing": ["none", "every_layer", "every_2_layers"]}
WINNER = {"micro_batch_size": 8, "checkpointing": "none"}
NUM_TRIALS = 9
"""All of the space, so that the winner is the same whatever happens."""
SEARCH = {
    **SMALL,
    "model": "patient:build",
    "num_steps": "12",
    "precision_percent": "0.001",
    "effective_batch_size": "8",
    "budget": "1GiB",
    "num_trials": str(NUM_TRIALS),
    "sampler": "tpe",
    "verify_steps": "0",
    "worker_timeout": "8",
    "study": "faults",
    "workers": "2",
    "space": json.dumps(SPACE),
}
MARK = "TEST_OF_FAULTS"
"""Environment variable by which the processes of a test are found."""


@dataclass
class Setting:
    """A project whose study and whose runs are in PostgreSQL."""

    project: Project
    postgresql: Postgresql
    server: MlflowServer
    url: str
    _seen: set[Path] = field(default_factory=set)

    @cached_property
    def _storage(self) -> BaseStorage:
        return open_storage(self.url)

    @property
    def trials(self) -> list[FrozenTrial]:
        """Every trial of the study, none where there is no study yet."""
        names = [study.study_name for study in self._storage.get_all_studies()]
        return optuna.load_study(storage=self._storage, study_name="faults").trials if "faults" in names else []

    def count(self, state: TrialState) -> int:
        """Return the number of trials in this state."""
        return sum(trial.state is state for trial in self.trials)

    def words(self, **settings: str) -> list[str]:
        """Return the command of a search."""
        return ["python", "-m", "fitproof", "search", *as_words({**SEARCH, "storage": self.url, **settings})]

    def hold(self) -> None:
        """Hold all trials after their first steps, so that what follows surely hits them in the middle."""
        self.file_of_hold.touch()

    def release(self) -> None:
        """Let the trials that are held go on."""
        self.file_of_hold.unlink()

    @property
    def file_of_hold(self) -> Path:
        """The file that holds the trials while it exists."""
        return self.project.folder / "hold"

    def wait_for_held(self, count: int) -> None:
        """Wait until this many trials more than at the last call are held."""
        wait_for(lambda: len(self._in_the_middle - self._seen) >= count, f"{count} trials that are held")
        self._seen |= self._in_the_middle

    @property
    def _in_the_middle(self) -> set[Path]:
        """The folders of the trials that have trained some steps and have no result."""
        files = self.project.folder.glob("runs/*/*/steps.jsonl")
        trained = [file.parent for file in files if file.read_text().count("\n") >= STEPS_BEFORE_A_HOLD]
        return {folder for folder in trained if not (folder / "result.json").exists()}

    def end_two_trainings_after(self, fault: Callable[[], None], seconds: float) -> int:
        """Let two trainings end after a fault, and wait; return how many trials were stored before."""
        self.hold()
        self.wait_for_held(2)
        num_stored, num_results = self.count(TrialState.COMPLETE), self.num_results
        fault()
        until = time.monotonic() + seconds
        self.release()
        wait_for(lambda: self.num_results == num_results + 2, "the end of both trainings")
        time.sleep(max(0.0, until - time.monotonic()))
        assert self.num_results == num_results + 2, "a worker goes on before it has stored its trial"
        return num_stored

    def stop_servers(self) -> None:
        """Stop PostgreSQL and the tracking server, which are on one machine here."""
        self.server.stop()
        self.postgresql.stop()

    @property
    def num_results(self) -> int:
        """The number of trials whose result is on local disk."""
        return len(list(self.project.folder.glob("runs/*/*/result.json")))

    def check_nothing_is_left(self, *clusters: RayCluster) -> None:
        """Check that no trial, no run and no process goes on."""
        wait_for(lambda: not self._processes(*clusters), "the end of the processes", seconds=60)
        assert {run.info.status for run in self.project.runs(self.server.address)} <= {"FINISHED", "KILLED"}

    def _processes(self, *clusters: RayCluster) -> list[psutil.Process]:
        tasks = [task for cluster in clusters for task in cluster.tasks_and_their_processes]
        return [*processes_with(MARK, str(self.project.folder)), *tasks]

    def check(self, *clusters: RayCluster) -> None:
        """Check that each configuration was measured once, nothing is left, and the winner is what it always is."""
        self.check_nothing_is_left(*clusters)
        trials = self.trials
        assert all(trial.state.is_finished() for trial in trials)
        measured = [trial for trial in trials if trial.state is TrialState.COMPLETE]
        assert len(measured) == NUM_TRIALS
        assert set(Counter(tuple(sorted(trial.params.items())) for trial in measured).values()) == {1}
        assert not [t for t in trials if t.user_attrs.get("outcome") == "crashed"], "no configuration is to blame"
        runs = [run for run in self.project.runs(self.server.address) if parent_id(run)]
        ok = [run for run in runs if run.data.tags["outcome"] == "ok"]
        assert sorted(int(run.data.tags["trial"]) - 1 for run in ok) == sorted(trial.number for trial in measured)
        assert max(measured, key=lambda trial: trial.values[0]).params == WINNER
        config = (self.project.folder / "best.yaml").read_text()
        assert all(f"{name}: {value}\n" in config for name, value in WINNER.items()), config


@pytest.fixture
def setting(tmp_path: Path, server: MlflowServer, postgresql: Postgresql, database_url: str) -> Iterator[Setting]:
    """Give a project with a study of its own, whose runs are in an experiment of its own."""
    project = Project.copy(tmp_path, with_store=False)
    project.environment |= {"MLFLOW_TRACKING_URI": server.address, "OMP_NUM_THREADS": "1", MARK: str(project.folder)}
    one = Setting(project, postgresql, server, database_url)
    (project.folder / "patient.py").write_text(f"HOLD = {str(one.file_of_hold)!r}\n{MODEL}")
    yield one
    client = MlflowClient(server.address)
    for run in project.runs(server.address):
        client.delete_run(run.info.run_id)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Give a Ray cluster of two raylets."""
    with running_ray(2) as nodes:
        yield nodes


@pytest.mark.long
def test_a_driver_a_task_and_a_raylet_of_ray_that_are_killed_lose_no_trial(
    setting: Setting, cluster: RayCluster
) -> None:
    """The trials of a second driver wait for a free raylet until the first one is killed."""
    setting.project.environment |= cluster.environment
    words = setting.words(executor="ray", ray_address=cluster.address)
    setting.hold()
    with started(setting.project, *words) as search:
        setting.wait_for_held(2)
        with started(setting.project, *words) as other:
            wait_for(lambda: setting.count(TrialState.RUNNING) == 4, "the trials of both drivers")
            kill(search)
            setting.wait_for_held(2)
            [raylet] = cluster.raylets[1:]
            [task] = [task for task in cluster.tasks if task.ppid() != raylet.pid]
            task.kill()
            setting.wait_for_held(1)
            [task] = [task for task in cluster.tasks if task.ppid() == raylet.pid]
            raylet.kill()
            wait_for_the_end([task])
            cluster.add_node()
            setting.wait_for_held(1)
            assert setting.count(TrialState.COMPLETE) == 0
            setting.release()
            out, err = other.communicate(timeout=300)
    assert other.returncode == 0, err
    assert out.count("its worker died; it is measured again") == 4, out
    assert setting.project.here("sync", {}).returncode == 0  # ends the run of the first driver
    setting.check(cluster)


def test_servers_that_are_away_and_a_network_that_hangs_lose_no_trial(setting: Setting, proxy: Proxy) -> None:
    """Trainings end in the meantime, and their trials are stored afterwards."""
    through_proxy = setting.url.replace(str(setting.postgresql.port), str(proxy.port))
    with started(setting.project, *setting.words(storage=through_proxy)) as search:
        wait_for(lambda: setting.count(TrialState.COMPLETE) >= 1, "a trial")
        num_stored = setting.end_two_trainings_after(proxy.hang, SECONDS_OF_A_HANG)
        assert setting.count(TrialState.COMPLETE) == num_stored
        proxy.flow()
        wait_for(lambda: setting.count(TrialState.COMPLETE) >= num_stored + 2, "both trials")

        num_stored_before = setting.end_two_trainings_after(setting.stop_servers, SECONDS_AWAY)
        setting.postgresql.start()
        wait_for(lambda: setting.count(TrialState.COMPLETE) >= num_stored_before + 2, "both trials, without MLflow")
        setting.server.start()
        out, err = search.communicate(timeout=300)
    assert search.returncode == 0 and "Traceback" not in err, err
    assert "its worker died" not in out, "a living worker lost its trial"
    assert setting.project.here("sync", {}).returncode == 0
    setting.check()


@pytest.mark.long
def test_a_search_and_a_worker_that_joined_lose_no_trial_when_they_are_killed(setting: Setting) -> None:
    """The worker goes on without the search, and the two searches that replace it go on without the worker."""
    joins = ["python", "-m", "fitproof", "worker", "--study", "faults", "--storage", setting.url, "--workers", "2"]
    setting.hold()
    with started(setting.project, *setting.words()) as search:
        setting.wait_for_held(2)
        with started(setting.project, *joins) as worker:
            setting.wait_for_held(2)
            kill(search)
            words = setting.words()
            with started(setting.project, *words) as one, started(setting.project, *words) as other:
                setting.wait_for_held(4)
                assert worker.poll() is None
                kill(worker)
                setting.release()
                said = [again.communicate(timeout=300) for again in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], said
    assert sum(out.count("its worker died; it is measured again") for out, _ in said) == 4, said
    setting.check()


@pytest.mark.long
def test_a_search_that_is_ended_by_ctrl_c_leaves_no_process_and_the_same_command_resumes(
    setting: Setting, cluster: RayCluster
) -> None:
    """On a Ray cluster, and on this machine."""
    setting.project.environment |= cluster.environment
    with started(setting.project, *setting.words(executor="ray", ray_address=cluster.address)) as search:
        interrupt(search, setting, cluster)
    with started(setting.project, *setting.words()) as search:
        wait_for(lambda: setting.count(TrialState.COMPLETE) >= 1, "a trial")
        interrupt(search, setting)
    again = setting.project.call(*setting.words())
    assert again.returncode == 0, again.stderr
    setting.check()


def kill(process: "Popen[str]") -> None:
    """Kill a process, and wait until nothing is left of it and of what it has started."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    process.wait()
    wait_for_the_end(family)


def interrupt(search: "Popen[str]", setting: Setting, *clusters: RayCluster) -> None:
    """Press Ctrl-C in the middle of two trials, and check that nothing is left."""
    setting.hold()
    setting.wait_for_held(2)
    err = interrupted(search)
    assert search.returncode == 130 and "Traceback" not in err, err
    assert setting.count(TrialState.RUNNING) == 0
    setting.check_nothing_is_left(*clusters)
    setting.release()
