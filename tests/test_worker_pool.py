"""A crew of processes: all is done once, errors arrive as they are, and nobody is left behind."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from conftest import ROOT, tiny

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.prediction.predict import predict_all
from pipeline.runtime.fork_server import has_server, loading, num_cores, start_server, stop_server
from pipeline.runtime.worker_pool import WorkerError, WorkerPool, run_in_worker

CPU = Hardware(kind="cpu", name="a processor", memory_bytes=2**34, capability=None)


def square(number: int) -> tuple[int, int]:
    if number < 0:
        raise InvalidInputError(f"{number} is negative; give another")
    if number == 0:
        os._exit(3)
    return number * number, os.getpid()


def test_every_task_is_done_once_and_by_others() -> None:
    with WorkerPool(square, 2) as pool:
        first = dict(pool.do([3, 4, 5]))
        second = dict(pool.do([6]))
        assert dict(pool.do([])) == {}
    assert {number: done[0] for number, done in first.items()} == {0: 9, 1: 16, 2: 25}
    assert second[0][0] == 36 and os.getpid() not in {done[1] for done in [*first.values(), *second.values()]}
    assert not multiprocessing.active_children()


def collector(_: int) -> tuple[bool, int]:
    return gc.isenabled(), gc.get_freeze_count()


def test_what_was_loaded_is_not_looked_through_for_garbage_but_all_else_is() -> None:
    with WorkerPool(collector, 1) as pool:
        [(_, (is_enabled, num_frozen))] = pool.do([0])
    assert is_enabled and num_frozen > 100_000


def test_a_program_that_imports_the_project_keeps_its_collector() -> None:
    code = "import gc, pipeline.prediction.predict, pipeline.jobs.search; assert gc.isenabled()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_server_that_was_stopped_is_started_again() -> None:
    for _ in range(2):
        stop_server()
        assert not has_server()
        with WorkerPool(square, 1) as pool:
            assert dict(pool.do([3]))[0][0] == 9
        assert has_server()
    stop_server()
    stop_server()


def test_a_module_is_loaded_while_something_else_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "slowly_loaded.py").write_text("import time; time.sleep(0.5); value = 7")
    (tmp_path / "wrongly_loaded.py").write_text("1 / 0")
    with loading("slowly_loaded"):
        assert not hasattr(sys.modules.get("slowly_loaded"), "value")
    assert sys.modules.pop("slowly_loaded").value == 7
    with loading("wrongly_loaded"):  # whoever needs it is told
        pass
    assert "wrongly_loaded" not in sys.modules
    with pytest.raises(InvalidInputError, match="no"), loading("slowly_loaded"):
        raise InvalidInputError("no")
    assert sys.modules.pop("slowly_loaded").value == 7


def test_a_mistake_arrives_as_it_is() -> None:
    with pytest.raises(InvalidInputError, match="-1 is negative; give another"), WorkerPool(square, 2) as pool:
        list(pool.do([2, -1]))
    assert not multiprocessing.active_children()


class TwoWordsError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class WrappingError(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(f"no shape for {name}")


def fail(kind: str) -> object:
    if kind == "odd":
        raise TwoWordsError("this cannot", "be unpickled")
    if kind == "wrapping":
        raise WrappingError("x")
    if kind == "of a module of its own":
        module = ModuleType("made_there")
        exec("class ThereError(Exception): pass", module.__dict__)
        sys.modules["made_there"] = module
        raise module.ThereError("far away")
    if kind == "unpicklable result":
        return lambda: None
    raise ZeroDivisionError("1 / 0")


@pytest.mark.parametrize(
    ("kind", "error", "words", "where"),
    [
        ("plain", ZeroDivisionError, "1 / 0", "in fail"),
        ("odd", WorkerError, "TwoWordsError: this cannot be unpickled", "in fail"),
        ("wrapping", WorkerError, "WrappingError: no shape for x", "in fail"),
        ("of a module of its own", WorkerError, "ThereError: far away", "in fail"),
        ("unpicklable result", Exception, "Can't pickle|Can't get local object", "in _serve"),
    ],
)
def test_an_error_of_the_work_arrives_with_its_words_and_traceback(
    kind: str, error: type[Exception], words: str, where: str
) -> None:
    with pytest.raises(error, match=words) as caught, WorkerPool(fail, 1) as pool:
        list(pool.do([kind]))
    [note] = caught.value.__notes__
    assert where in note and not multiprocessing.active_children()


def test_work_is_done_elsewhere_where_a_server_has_loaded_what_it_needs() -> None:
    stop_server()
    assert run_in_worker(square, 3) == (9, os.getpid()) and not has_server()
    start_server()
    squared, number = run_in_worker(square, 3)
    assert squared == 9 and number != os.getpid()


def test_the_end_of_a_process_is_told() -> None:
    with pytest.raises(WorkerError, match="exit code 3"), WorkerPool(square, 2) as pool:
        list(pool.do([2, 0]))
    assert not multiprocessing.active_children()


def test_the_end_of_a_process_between_two_rounds_is_told() -> None:
    with WorkerPool(square, 1) as pool:
        [(_, (_, number))] = pool.do([2])
        psutil.Process(number).kill()
        psutil.Process(number).wait(10)
        with pytest.raises(WorkerError, match="exit code -9"):
            list(pool.do([3]))


def test_at_least_one_core_may_be_used() -> None:
    assert 1 <= num_cores() <= (os.cpu_count() or 1)


def test_predictions_of_several_processes_are_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = [
        tiny(micro_batch_size=size, checkpointing=policy, vocabulary_size=303)
        for size in (12, 1, 3, 8, 2, 4)
        for policy in ("none", "every_layer")
    ]
    together = dict(predict_all(experiments, CPU, num_processes=2))
    monkeypatch.setenv("HEADROOM_CACHE", str(tmp_path))  # which has nothing of what the others left
    assert together == dict(predict_all(experiments, CPU, num_processes=0))
    assert len(list(tmp_path.glob("trace-*"))) == 8  # of 1, 2, 4 and 8, which tell 3 and 12


def test_few_predictions_are_left_to_processes_where_these_are_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Noted(WorkerPool[object, object]):
        def __init__(self, work: object, num_processes: int) -> None:
            started.append(num_processes)
            super().__init__(work, num_processes)  # type: ignore[arg-type]

    monkeypatch.setattr("pipeline.prediction.predict.WorkerPool", Noted)
    monkeypatch.setattr("pipeline.prediction.predict.num_cores", lambda: 2)
    experiments = [tiny(micro_batch_size=size, vocabulary_size=307) for size in (1, 2)]
    stop_server()
    alone = dict(predict_all(experiments, CPU))
    assert not started and not has_server()
    with WorkerPool(square, 1):
        assert dict(predict_all(experiments, CPU)) == alone
    assert started == [2]


def test_processes_that_predict_refuse_what_one_refuses() -> None:
    with pytest.raises(InvalidInputError, match="tf32 needs a CUDA GPU"):
        list(predict_all([tiny(), tiny(precision="tf32")], CPU, num_processes=2))
    assert not multiprocessing.active_children()


def test_ctrl_c_ends_all_processes_at_once() -> None:
    code = """
import sys
sys.path.insert(0, "tests")
from conftest import tiny
from test_crew import CPU
from pipeline.prediction.predict import predict_all
from pipeline.runtime.fork_server import num_cores
for number, _ in predict_all([tiny(micro_batch_size=size) for size in range(9, 409)], CPU, num_processes=2):
    print(number, flush=True)
"""
    words = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3  # two that predict, and the server that they are forked from
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert process.returncode == -signal.SIGINT and not alive
