"""Bad input of workers that join a search, and of a Ray cluster: the rule, the value and the remedy, exit code 2."""

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY, tiny
from processes import free_port
from servers import Postgresql

from pipeline.base.errors import InvalidInputError
from pipeline.cli import main
from pipeline.memory.device import device_name
from pipeline.runtime import ray_executor
from pipeline.runtime.environment import versions
from pipeline.runtime.observer import Observer
from pipeline.runtime.ray_executor import ray_executors
from pipeline.searching import problem as problem_module
from pipeline.searching.experiment_problem import ExperimentProblem, make_experiment_problem
from pipeline.searching.session import SESSION, Session, session_of
from pipeline.searching.setup import open_workers
from pipeline.searching.study import StoredStudy
from pipeline.training.loop import never_stop

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SERVER = "http://127.0.0.1:9"
"""The address of a tracking server, which no worker that is refused asks."""
Begin = Callable[..., list[str]]


@pytest.fixture(scope="module")
def problem() -> ExperimentProblem:
    return make_experiment_problem({**TINY, "budget": "1GiB", "space": {"micro_batch_size": [1, 2]}, "sampler": "tpe"})


@pytest.fixture
def begin(problem: ExperimentProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Give a function that begins a search, with these changes to what it stores for workers, and returns a worker's
    command.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")

    def command(storage: str = "sqlite:///optuna.db", **changes: Any) -> list[str]:
        study = StoredStudy(storage, "shared", problem.directions, problem.identity)
        session: Session = session_of(problem, study.name, None, SERVER)
        study.announce(replace(session, **changes))
        return ["worker", "--study", "shared", "--storage", storage]

    return command


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message with which a command is refused before it writes anything."""
    assert main(words) == 2
    captured = capsys.readouterr()
    first, _, refused = captured.err.partition("\n")
    assert first.startswith("fitproof worker: ") and refused.startswith("error: ") and not captured.out
    assert len(refused.strip().splitlines()) <= 2
    assert not Path("runs").exists()
    return captured.err


def test_a_worker_of_another_version_is_refused_with_the_difference(
    begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    own = versions()
    message = refusal(begin(versions={**own, "code of fitproof": "0123456789ab", "torch": "2.9.0"}), capsys)
    assert f"code of fitproof is {own['code of fitproof']}, and is 0123456789ab there" in message
    assert f"torch is {own['torch']}, and is 2.9.0 there" in message and "optuna" not in message
    assert "install the same on both machines" in message


def test_a_worker_of_a_version_with_other_facts_about_a_search_is_refused_as_well(
    begin: Begin, problem: ExperimentProblem, capsys: pytest.CaptureFixture[str]
) -> None:
    words = begin()
    study = StoredStudy("sqlite:///optuna.db", "shared", problem.directions, problem.identity)
    stored = {"versions": {**versions(), "code of fitproof": "0123456789ab"}, "of_the_future": 1}
    study._study.set_user_attr(SESSION, stored)
    assert "and is 0123456789ab there" in refusal(words, capsys)


def test_a_worker_on_another_card_is_refused_with_both(
    begin: Begin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = begin()
    about = problem_module.environment(CPU)
    monkeypatch.setattr(problem_module, "environment", lambda device: {**about, "device_name": "another card"})
    message = refusal(words, capsys)
    assert f"device_name is another card, and was {about['device_name']}" in message
    assert "measure under the same conditions" in message


def test_a_worker_of_a_study_with_other_settings_is_refused_with_the_difference(
    begin: Begin, problem: ExperimentProblem, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = session_of(problem, "shared", None, SERVER).settings
    message = refusal(begin(settings={**settings, "sequence_length": 16}), capsys)
    assert "sequence_length is 16, and was 32" in message


def test_a_worker_makes_the_same_problem_of_a_search_whose_file_sets_a_dimension(tmp_path: Path) -> None:
    """The file sets one value of a dimension, which varies all the same, and the worker does not have the file."""
    file = tmp_path / "best.yaml"
    file.write_text("micro_batch_size: 2\nlearning_rate: 0.01\nbudget: 60%\n")
    given = {**TINY, "config": str(file), "space": {"micro_batch_size": [1, 2]}, "sampler": "tpe"}
    begun = make_experiment_problem(given)
    settings = session_of(begun, "shared", None, SERVER).settings
    file.unlink()
    joined = make_experiment_problem(settings)
    assert joined.identity == begun.identity and joined.space == begun.space
    assert len(joined.space.choices) == 2 and joined.budget_bytes == begun.budget_bytes


def test_a_worker_on_another_machine_needs_servers(
    begin: Begin, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(begin(host="elsewhere"), capsys)
    assert "storage of the search on elsewhere is a file (sqlite:///optuna.db); use PostgreSQL" in message
    message = refusal(begin(database_url, host="elsewhere", tracking_uri="sqlite:///mlflow.db"), capsys)
    assert "MLflow's store of the search on elsewhere is a file (sqlite:///mlflow.db); use PostgreSQL" in message
    assert "an MLflow server, see docs/scaling.md" in message


def test_a_worker_joins_a_study_that_a_search_has_begun(
    begin: Begin, problem: ExperimentProblem, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = "sqlite:///optuna.db"
    other = ["worker", "--study", "other", "--storage", storage]
    assert "sqlite:///optuna.db is a file that does not exist; check its path" in refusal(other, capsys)
    assert not Path("optuna.db").exists()
    begin(storage)
    assert "no study is called 'other' in this storage; the studies are shared" in refusal(other, capsys)
    StoredStudy(storage, "other", problem.directions, problem.identity)
    assert "none has begun the study 'other'; start it first" in refusal(other, capsys)
    assert "study must be given" in refusal(["worker", "--storage", storage], capsys)


def test_a_worker_with_a_wrong_password_or_without_a_server_is_refused(
    begin: Begin, postgresql: Postgresql, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "wrong-secret")
    message = refusal(["worker", "--study", "shared", "--storage", postgresql.url("postgres")], capsys)
    assert "password authentication failed" in message and "PGPASSWORD" in message and "wrong-secret" not in message
    closed = f"postgresql+psycopg://fitproof@127.0.0.1:{free_port()}/optuna"
    message = refusal(["worker", "--study", "shared", "--storage", closed], capsys)
    assert "the study's storage must be reachable" in message and "Connection refused" in message


def test_more_workers_than_cores_are_refused_in_a_worker(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal([*begin(), "--workers", "1000"], capsys)
    assert "each worker needs a core of its own" in message and "set workers to " in message


# Ray


def made_up_ray(*machines: dict[str, float], **functions: Any) -> Any:
    """Return a module like Ray's that is connected to a cluster of these machines, and one that has left it."""
    nodes = [*({"Alive": True, "Resources": one} for one in machines), {"Alive": False, "Resources": {"GPU": 99.0}}]
    errors = {name: type(name, (Exception,), {}) for name in ("RayError", "RayTaskError")}
    return SimpleNamespace(
        **{
            "init": lambda **_: None,
            "shutdown": lambda: None,
            "nodes": lambda: nodes,
            "remote": lambda **_: lambda function: SimpleNamespace(remote=function),
            "exceptions": SimpleNamespace(**errors),
            **functions,
        }
    )


def num_workers(device: torch.device, wanted: int | None, num_devices: int = 1) -> int:
    """Return the number of workers on the cluster."""
    with ray_executors(None, device, wanted, num_devices) as executors:
        return len(executors)


def test_ray_that_is_not_installed_or_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SERVER)
    words = ["search", "--device", "cpu", "--executor", "ray", "--space", '{"micro_batch_size": [1]}']
    monkeypatch.setitem(sys.modules, "ray", made_up_ray({"CPU": 2.0}))
    port = free_port()
    assert main([*words, "--ray_address", f"127.0.0.1:{port}"]) == 2
    message = capsys.readouterr().err
    assert f"the Ray cluster must be reachable, and 127.0.0.1:{port} is not" in message
    assert "start it with: ray start --head, or leave ray_address out" in message
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "executor=ray needs the package ray, which is not installed; pip install '.[ray]' in the checkout" in message
    assert "or set executor=local" in message
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_cluster_has_gpus_or_cores_of_one_machine_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "device_name", str)
    monkeypatch.setitem(sys.modules, "ray", made_up_ray({"CPU": 3.0, "GPU": 7.0}, {"CPU": 8.0, "GPU": 1.0}))
    assert [num_workers(CPU, None), num_workers(CPU, 11), num_workers(GPU, None), num_workers(GPU, None, 3)] == [
        *(1, 11, 8, 2)
    ]
    for device, wanted, num_devices, message in (
        (CPU, 12, 1, "each worker needs a CPU of its own, and the cluster has enough for 11 of 12; set workers to 11"),
        (GPU, 9, 1, "each worker needs a GPU of its own, and the cluster has enough for 8 of 9; set workers to 8"),
        (GPU, 2, 4, "each worker needs 4 GPUs of one machine of its own, .* for 1 of 2; set workers to 1"),
    ):
        with pytest.raises(InvalidInputError, match=f"{message} or less, or add machines to the cluster"):
            num_workers(device, wanted, num_devices)
    monkeypatch.setitem(sys.modules, "ray", made_up_ray({"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}))
    with pytest.raises(InvalidInputError, match="needs 2 GPUs .* enough for 0 of 1; add machines to the cluster"):
        num_workers(GPU, None, 2)


@pytest.mark.usefixtures("threads")
def test_a_task_has_a_share_of_the_cores_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray lets it use as many threads; a task that asks for more than any machine has would wait for ever."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(ray_executor, "device_name", str)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machines = ({"CPU": 8.0, "GPU": 2.0}, {"CPU": 6.0, "GPU": 2.0}, {"CPU": 2.0})
    ray = made_up_ray(
        *machines, remote=lambda **given: asked.append(given) or (lambda _: SimpleNamespace(remote=print))
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    for device, wanted, num_devices, cores in ((CPU, 1, 1, 8), (CPU, 2, 1, 6), (CPU, 5, 1, 2), (CPU, 8, 1, 2)):
        num_workers(device, wanted, num_devices)
        assert (asked[-1]["num_cpus"], asked[-1]["num_gpus"]) == (cores, 0)
        assert torch.get_num_threads() == cores, "what operators allocate depends on the number of threads"
    for num_devices, cores in ((1, 3), (2, 6)):
        num_workers(GPU, None, num_devices)
        assert (asked[-1]["num_cpus"], asked[-1]["num_gpus"]) == (cores, num_devices)
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    num_workers(CPU, 1)
    assert torch.get_num_threads() == 1, "the tasks have what the user has set"


def test_a_task_has_the_environment_on_which_measurements_depend(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(ray_executor, "device_name", str)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setitem(sys.modules, "ray", made_up_ray({"GPU": 1.0}, init=lambda **words: given.append(words)))
    num_workers(GPU, None)
    variables = given[0]["runtime_env"]["env_vars"]
    assert variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True" and "HF_TOKEN" not in variables


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_a_task_whose_events_nobody_receives_is_cancelled(
    error: type[BaseException], ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Observer):
        def message(self, message: str) -> None:
            raise error

    class Events:
        def __next__(self) -> str:
            return "a message"

        def completed(self) -> str:
            return "the end"

    events, cancelled = Events(), []
    functions = {"wait": lambda one, timeout: (one if ends or one == [events] else [], []), "get": lambda event: event}
    ray = made_up_ray(**functions, cancel=lambda one, force=False: cancelled.append((one, force)))
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(error):
        ray_executor.run_task(lambda *_: events, tiny(), tmp_path / "log.txt", [Failing()])
    assert cancelled == [(events, False), *([] if ends else [(events, True)])]


def test_a_task_that_is_cancelled_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    task = ray_executor._task(device_name(CPU), versions(), tiny(num_steps=100_000), None, never_stop)
    next(task)
    assert list(tmp_path.glob("*/log.txt"))
    task.close()  # as Ray does after its KeyboardInterrupt
    assert not list(tmp_path.glob("tmp*"))


def test_a_task_on_another_card_or_of_another_version_is_refused_with_the_difference() -> None:
    experiment, own = tiny(corpus="quick_fox"), versions()
    with pytest.raises(InvalidInputError, match=f"{re.escape(device_name(CPU))} is not another card"):
        next(ray_executor._task("another card", own, experiment, None, never_stop))
    with pytest.raises(InvalidInputError, match="torch is .*, and is 2.9.0 there; install the same"):
        next(ray_executor._task(device_name(CPU), {**own, "torch": "2.9.0"}, experiment, None, never_stop))


def test_a_gpu_that_is_named_is_no_machine_of_a_cluster() -> None:
    settings = SimpleNamespace(executor="ray", ray_address=None, workers=None)
    problem: Any = SimpleNamespace(settings=settings, is_device_named=True, base=SimpleNamespace(device=GPU))
    message = "executor=ray gives .* names one; set device=cuda, or executor=local"
    with pytest.raises(InvalidInputError, match=message), open_workers(problem):
        pass
