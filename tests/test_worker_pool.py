"""A pool of worker processes: every task is done once, errors arrive with their text, no process is left behind."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import CPU, ROOT, Received, tiny

from pipeline.base.contracts import Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.processes import num_cores
from pipeline.config.experiment import Experiment
from pipeline.prediction.predict import predict, predict_each
from pipeline.prediction.prediction import Prediction
from pipeline.runtime.fork_server import loading, server_pid, start_server, stop_server
from pipeline.runtime.placement import Placement
from pipeline.runtime.run import execute
from pipeline.runtime.worker_pool import WorkerError, run_all, worker_pool


def square(number: int) -> tuple[int, int]:
    if number < 0:
        raise InvalidInputError(f"{number} is negative; give another")
    if number == 0:
        os._exit(3)
    return number * number, os.getpid()


def in_worker(function: Any, argument: Any) -> Any:
    with worker_pool(1) as pool:
        [(_, result)] = run_all(pool, function, [argument])
    return result


def test_every_task_is_done_once_in_other_processes() -> None:
    with worker_pool(2) as pool:
        first = dict(run_all(pool, square, [3, 4, 5]))
        second = dict(run_all(pool, square, [6]))
        assert dict(run_all(pool, square, [])) == {}
    assert {number: done[0] for number, done in first.items()} == {0: 9, 1: 16, 2: 25}
    assert second[0][0] == 36 and os.getpid() not in {done[1] for done in [*first.values(), *second.values()]}
    assert not multiprocessing.active_children()


def collector(_: int) -> tuple[bool, int, bool]:
    return gc.isenabled(), gc.get_freeze_count(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_worker_freezes_preloaded_objects_and_ignores_ctrl_c() -> None:
    with worker_pool(1) as pool:
        [(_, (is_enabled, num_frozen, ignores_interrupt))] = run_all(pool, collector, [0])
    assert is_enabled and num_frozen > 100_000 and ignores_interrupt


def test_a_stopped_fork_server_is_started_again() -> None:
    for _ in range(2):
        stop_server()
        assert server_pid() is None
    squared, number = in_worker(square, 3)
    assert squared == 9 and number != os.getpid()
    assert server_pid() is not None


def test_a_module_is_imported_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_invalid_input_error_arrives_unchanged() -> None:
    with pytest.raises(InvalidInputError, match="^-1 is negative; give another$"), worker_pool(2) as pool:
        list(run_all(pool, square, [2, -1]))
    assert not multiprocessing.active_children()


class TwoWordsError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail(kind: str) -> object:
    if kind == "not unpicklable":
        raise TwoWordsError("this cannot", "be unpickled")
    if kind == "unpicklable result":
        return lambda: None
    raise ZeroDivisionError("1 / 0")


@pytest.mark.parametrize(
    ("kind", "error", "words", "where"),
    [
        ("plain", WorkerError, "ZeroDivisionError: 1 / 0", "in fail"),
        ("not unpicklable", WorkerError, "TwoWordsError: this cannot be unpickled", "in fail"),
        ("unpicklable result", Exception, "Can't pickle|Can't get local object", "_sendback_result"),
    ],
)
def test_an_error_arrives_with_its_type_message_and_traceback(
    kind: str, error: type[Exception], words: str, where: str
) -> None:
    with pytest.raises(error, match=words) as caught, worker_pool(1) as pool:
        list(run_all(pool, fail, [kind]))
    assert where in str(caught.value.__cause__) and not multiprocessing.active_children()


def test_the_unexpected_end_of_a_worker_is_reported() -> None:
    with pytest.raises(WorkerError, match="a worker process ended before"), worker_pool(2) as pool:
        list(run_all(pool, square, [2, 0]))
    assert not multiprocessing.active_children()


def test_the_unexpected_end_of_an_idle_worker_is_reported() -> None:
    with pytest.raises(WorkerError, match="a worker process ended before"), worker_pool(1) as pool:
        [(_, (_, number))] = run_all(pool, square, [2])
        process = psutil.Process(number)
        process.kill()
        process.wait(10)
        list(run_all(pool, square, [3]))


def test_leaving_early_ends_the_workers_and_cancels_the_queue() -> None:
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), worker_pool(2) as pool:
        for number, _ in run_all(pool, time.sleep, [0.0, *[60.0] * 50]):
            assert number == 0
            raise KeyboardInterrupt
    assert time.monotonic() - start < 30 and not multiprocessing.active_children()


def test_at_least_one_core_is_available() -> None:
    assert 1 <= num_cores() <= (os.cpu_count() or 1)


def test_predictions_of_several_processes_equal_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = [
        tiny(micro_batch_size=size, checkpointing=policy, vocabulary_size=303)
        for size in (12, 1, 3, 8, 2, 4)
        for policy in ("none", "every_layer")
    ]
    together = dict(predict_each(experiments, CPU))
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))  # an empty cache
    assert [*map(together.get, range(len(experiments)))] == [predict(one, CPU) for one in experiments]


def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_a_worker_has_the_environment_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    start_server()
    monkeypatch.setenv("SET_LATER", "1")
    assert in_worker(variable, "SET_LATER") == "1"
    monkeypatch.delenv("SET_LATER")
    assert in_worker(variable, "SET_LATER") is None


def emit_variable(_: Experiment, __: Prepared, emit: Callable[[Any], None]) -> None:
    emit(variable("SET_LATER"))


def test_a_training_has_the_environment_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_server()
    received, experiment, log = Received(), tiny(corpus="quick_fox"), tmp_path / "log.txt"
    monkeypatch.setenv("SET_LATER", "1")
    execute(experiment, log, [received], work=emit_variable)
    execute(experiment, log, [received], work=emit_variable, placement=Placement({"SET_LATER": "2"}))
    monkeypatch.delenv("SET_LATER")
    execute(experiment, log, [received], work=emit_variable)
    assert received.messages == ["1", "2", None]


def test_workers_refuse_the_same_experiments_as_one_process() -> None:
    outcomes = dict(predict_each([tiny(), tiny(precision="tf32")], CPU))
    assert isinstance(outcomes[0], Prediction) and "tf32 needs a CUDA GPU" in str(outcomes[1])
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.skipif(num_cores() < 2, reason="there is one worker")
def test_ctrl_c_ends_all_processes_at_once() -> None:
    code = """
import sys
sys.path.insert(0, "tests")
from conftest import tiny
from test_worker_pool import CPU
from pipeline.prediction.predict import predict_each
for number, _ in predict_each([tiny(micro_batch_size=size) for size in range(9, 409)], CPU):
    print(number, flush=True)
"""
    with started(code) as process:
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3  # two workers and the fork server
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert process.returncode == -signal.SIGINT and not alive


@pytest.mark.slow
def test_an_end_does_not_wait_for_a_task_that_is_still_being_sent(tmp_path: Path) -> None:
    """Python before 3.11.5 would: https://github.com/python/cpython/issues/94777."""
    (tmp_path / "napping.py").write_text("import time\n\ndef nap(data):\n    time.sleep(3600)\n")
    code = f"""
import sys, time
sys.path.insert(0, {str(tmp_path)!r})
from napping import nap
from pipeline.runtime.worker_pool import worker_pool
with worker_pool(2) as pool:
    sent = [pool.submit(nap, bytes(5_000_000)) for _ in range(12)]
    while not all(future.running() for future in sent[:3]):
        time.sleep(0.1)
    time.sleep(1)
    print("the third is being sent", flush=True)
    raise KeyboardInterrupt
"""
    with started(code) as process:
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGINT


def hang(experiment: Experiment, prepared: Prepared, emit: Callable[[Any], None]) -> None:
    emit("it has begun")
    time.sleep(3600)


def test_workers_and_a_training_that_hangs_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """The training would keep its GPU, and nothing that it sends to a process that was killed would fail."""
    code = f"""
import sys, time
sys.path.insert(0, "tests")
from pathlib import Path
from conftest import Received, tiny
from test_worker_pool import hang
from pipeline.runtime.run import execute
from pipeline.runtime.worker_pool import run_all, worker_pool
class Writing(Received):
    def message(self, message):
        print(message, flush=True)
with worker_pool(2) as pool:
    tasks = run_all(pool, time.sleep, [0.0, *[0.1] * 10_000])
    next(tasks)
    execute(tiny(corpus="quick_fox"), Path({str(tmp_path / "log.txt")!r}), [Writing()], work=hang)
"""
    with started(code) as process:
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4  # two workers, the training and the fork server
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


@contextmanager
def started(code: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Give a process that runs this code and has printed its first line."""
    words = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.kill()  # if it is alive, since the end of this block waits for it
