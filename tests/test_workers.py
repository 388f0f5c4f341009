"""Several workers of one study: what they queue, what happens if one of them dies, and that none measures in vain."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from mlflow import MlflowClient
from optuna.trial import FrozenTrial, TrialState, create_trial
from project import new_store
from test_search import SPACE, result_of

from pipeline.base.errors import InvalidInputError
from pipeline.base.processes import cores
from pipeline.base.results import Outcome, Result
from pipeline.base.units import MIB
from pipeline.config.space import Space
from pipeline.runtime.placement import ANYWHERE, Placement, placements
from pipeline.runtime.run import WorkerLostError
from pipeline.searching.study import StoredStudy
from pipeline.searching.trial_record import judge
from pipeline.searching.trials import Proposal
from pipeline.tracking.job import end_lost

TIMEOUT = 6
"""Seconds after which a worker of these tests counts as dead: its heartbeats are a second apart."""
DIES = """
import os, signal, sys
from test_search import SPACE
from pipeline.searching.study import StoredStudy
from pipeline.searching.trials import Proposal
study = StoredStudy(sys.argv[1], "test", ("maximize",), {"budget": "100MiB"}, 6)
study.enqueue(Proposal(SPACE.choices[0]), SPACE)
study.run_next(lambda *_: os.kill(os.getpid(), signal.SIGKILL), 20, lambda: None)
"""
"""A worker that is killed in the middle of its trial."""


def open_study(storage: str) -> StoredStudy:
    return StoredStudy(storage, "test", ("maximize",), {"budget": "100MiB"}, TIMEOUT)


def measured(number: int, queued: Proposal) -> FrozenTrial:
    result, metrics = result_of(queued.choice, oom=False)
    return judge(result, metrics, 100 * MIB)


def die(storage: str) -> None:
    """Run a worker that is killed in its trial, and wait until it counts as dead."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    killed = subprocess.run([sys.executable, "-c", DIES, storage], env={**os.environ, "PYTHONPATH": path})
    assert killed.returncode == -9
    time.sleep(TIMEOUT + 1.5)


def with_one_queued(folder: Path) -> tuple[str, StoredStudy]:
    """Return the storage of a study and the study, which has one configuration in its queue."""
    storage = f"sqlite:///{folder}/optuna.db"
    study = open_study(storage)
    assert study.enqueue(Proposal(SPACE.choices[0]), SPACE)
    return storage, study


@pytest.mark.slow
def test_the_trial_of_a_dead_worker_returns_to_the_queue_once(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/optuna.db"
    study = open_study(storage)
    die(storage)
    study.free_stale()
    assert list(study.lost()) == [(0, True)] and not list(study.lost())
    assert study.num_waiting == 1 and study.taken == SPACE.choices[:1]
    die(storage)  # it takes the trial that waits
    study.free_stale()
    assert study.num_open == 0 and list(study.lost()) == [(1, False)]
    [crashed] = study.trials
    assert crashed.user_attrs["outcome"] == Outcome.CRASHED and "died in 2 trials" in crashed.user_attrs["detail"]
    assert not study.enqueue(Proposal(SPACE.choices[0]), SPACE), "it would kill a third worker"
    states = [trial.state for trial in study._study.trials]
    assert states == [TrialState.FAIL] * len(states)


def test_a_worker_that_is_slow_to_store_heartbeats_loses_its_trial_and_goes_on(tmp_path: Path) -> None:
    storage, study = with_one_queued(tmp_path)

    def closed_by_another(number: int, queued: Proposal) -> FrozenTrial:
        other = open_study(storage)
        other._study.tell(number, state=TrialState.FAIL)
        return measured(number, queued)

    assert study.run_next(closed_by_another, 20, lambda: None) is None
    assert study.trials == [] and study.num_open == 0


def test_a_trial_that_another_worker_has_closed_is_not_queued_again_by_its_own(tmp_path: Path) -> None:
    storage, study = with_one_queued(tmp_path)

    def lost_twice(number: int, queued: Proposal) -> FrozenTrial:
        other = open_study(storage)
        other._study.tell(number, state=TrialState.FAIL)
        assert other.enqueue(Proposal(SPACE.choices[0]), SPACE)
        raise WorkerLostError

    assert study.run_next(lost_twice, 20, lambda: None) is None
    assert study.num_waiting == study.num_open == 1 and not list(study.lost())


def test_an_error_of_a_trial_ends_its_worker(tmp_path: Path) -> None:
    """Also one that is a ValueError, or of a trial that another worker has closed, which Optuna cannot store."""
    storage = f"sqlite:///{tmp_path}/optuna.db"
    study, other = open_study(storage), open_study(storage)

    def full_disk(number: int, queued: Proposal) -> FrozenTrial:
        raise InvalidInputError("the output folder must be writable")

    def interrupted(number: int, queued: Proposal) -> FrozenTrial:
        other._study.tell(number, state=TrialState.FAIL)
        raise KeyboardInterrupt

    for measure, error in ((full_disk, InvalidInputError), (interrupted, KeyboardInterrupt)):
        assert study.enqueue(Proposal(SPACE.choices[0]), SPACE)
        with pytest.raises(error):
            study.run_next(measure, 20, lambda: None)
        assert study.trials == [] and study.num_open == 0


@pytest.mark.filterwarnings("ignore:Heartbeat of storage is supposed to be used with Study.optimize")
def test_a_running_trial_without_any_heartbeat_is_closed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = open_study(f"sqlite:///{tmp_path}/optuna.db")
    study._study.add_trial(
        create_trial(state=TrialState.RUNNING)
    )  # what a worker leaves that is killed before its first heartbeat
    study.free_stale()
    assert study.num_open == 1
    monkeypatch.setattr(study, "_worker_timeout", -1)
    study.free_stale()
    assert study.num_open == 0 and study.trials == [] and not list(study.lost())
    assert study.enqueue(Proposal(SPACE.choices[0]), SPACE)
    assert study._study.ask().number == 1 and study.num_waiting == 0
    study.free_stale()
    assert study.num_waiting == 1 and list(study.lost()) == [(1, True)], (
        "it has a configuration, which is measured again"
    )


def test_workers_of_several_processes_measure_each_configuration_once(tmp_path: Path) -> None:
    space = Space({"micro_batch_size": (1, 2, 4, 8), "precision": ("fp32", "bf16"), "seed": (1, 2, 3)})
    storage = f"sqlite:///{tmp_path}/optuna.db"
    studies = [StoredStudy(storage, "test", ("maximize",), {}) for _ in range(4)]  # as four processes have
    turns, left = [threading.Lock() for _ in studies], [*space.choices, *space.choices]

    def sleeping(number: int, queued: Proposal) -> FrozenTrial:
        time.sleep(0.05)
        result = Result(outcome=Outcome.OK, seconds_total=0.2)
        metrics = {"tokens_per_second": 1.0, "peak_allocated_mib": 1.0}
        return judge(result, metrics, 100 * MIB)

    def work(number: int) -> None:
        study, turn = studies[number % len(studies)], turns[number % len(studies)]
        while left or study.num_waiting:
            with ExitStack() as own:
                own.enter_context(turn)
                if study.num_waiting or (left and study.enqueue(Proposal(left.pop()), space)):
                    study.run_next(sleeping, 1000, own.close)

    with ThreadPoolExecutor(8) as pool:
        for worker in [pool.submit(work, number) for number in range(8)]:
            worker.result()
    counts = Counter(tuple(trial.params.items()) for trial in studies[0].trials)
    assert len(counts) == len(space.choices) and set(counts.values()) == {1}
    assert all(trial.state.is_finished() for trial in studies[0]._study.trials)


A100, L4 = SimpleNamespace(name="A100", total_memory=40 * 2**30), SimpleNamespace(name="L4", total_memory=22 * 2**30)


def show_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: SimpleNamespace) -> None:
    """Let torch see these GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpus[device.index])


def shown_to(places: Sequence[Placement]) -> list[str]:
    """Return the GPUs that CUDA shows to each worker."""
    return [place.environment["CUDA_VISIBLE_DEVICES"] for place in places]


def test_workers_have_a_gpu_or_a_share_of_the_cores_each(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, first, second = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    show_gpus(monkeypatch, A100, A100, A100, A100)
    assert placements(cpu, False, None) == placements(cpu, False, 1) == placements(second, True, None) == [ANYWHERE]
    assert placements(first, True, None) == [ANYWHERE], "cuda:0 names one GPU as cuda:1 does"
    shares = [place.cores for place in placements(cpu, False, 2)] if len(cores()) > 1 else []
    assert all(share is not None and len(share) == len(cores()) // 2 for share in shares)
    assert len({core for share in shares if share for core in share}) == sum(map(len, filter(None, shares)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert shown_to(placements(first, False, None)) == ["0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-8a1f,7,5")
    assert shown_to(placements(first, False, 2)) == ["3", "GPU-8a1f"]
    with pytest.raises(
        InvalidInputError, match="each worker needs a visible GPU of its own, and .* enough for 4 of 5 workers"
    ):
        placements(first, False, 5)
    assert placements(first, False, None, num_devices=4) == [ANYWHERE]
    assert shown_to(placements(first, False, None, 2)) == ["3,GPU-8a1f", "7,5"]
    with pytest.raises(InvalidInputError, match="each worker needs 2 visible GPUs of its own, .* enough for 2 of 3"):
        placements(first, False, 3, 2)
    with pytest.raises(InvalidInputError, match="each worker needs a core of its own"):
        placements(cpu, False, len(cores()) + 1)
    for named in (first, second):
        with pytest.raises(InvalidInputError, match=f"device={named} names one; set device=cuda, or workers=1"):
            placements(named, True, 2)


def test_workers_have_gpus_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials on different cards do not compare."""
    first = torch.device("cuda", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    show_gpus(monkeypatch, A100, L4, A100, SimpleNamespace(name="A100", total_memory=80 * 2**30))
    assert shown_to(placements(first, False, None)) == shown_to(placements(first, False, 2)) == ["0", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")
    assert shown_to(placements(first, False, None)) == ["7", "5"]
    message = (
        "a visible GPU of its own, all of one model, and only 2 of 4 are like the first, and this machine has enough "
        "for 2 of 4 workers; set workers to 2 or less, or choose GPUs with CUDA_VISIBLE_DEVICES"
    )
    with pytest.raises(InvalidInputError, match=message):
        placements(first, False, 4)


def test_a_lost_trial_ends_its_own_run_and_none_of_a_study_with_the_same_name(tmp_path: Path) -> None:
    """Automatic names are equal where settings are, and the tracking server may be shared."""
    client = MlflowClient(new_store(tmp_path))
    experiment = client.create_experiment("test")
    keys = [
        StoredStudy(f"sqlite:///{tmp_path}/{storage}.db", "the user's", ("maximize",), {}).key
        for storage in ("one", "one", "other")
    ]
    assert keys[0] == keys[1] != keys[2]
    runs = [client.create_run(experiment, tags={"study_key": key, "trial": "3"}).info.run_id for key in keys[1:]]
    end_lost(client, experiment, keys[0], 2)
    assert [client.get_run(run).info.status for run in runs] == ["KILLED", "RUNNING"]
