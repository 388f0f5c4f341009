"""Runs in processes of their own: however a process ends, the outcome is a value."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import EACH_CARD, Received, tiny
from simulated_programs import execute_on

from pipeline.base.contracts import Prepared
from pipeline.base.results import MemoryUse, Outcome, Result, StepRecord
from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment
from pipeline.memory.out_of_memory import LIBRARY_TEXTS
from pipeline.runtime.failures import Failed, failure_of, how_it_ended
from pipeline.runtime.fork_server import server_pid
from pipeline.runtime.observer import Run
from pipeline.runtime.run import execute, run
from pipeline.runtime.run_folder import read_steps
from pipeline.simulation.cards import find_card
from pipeline.training.loop import train
from pipeline.training.metrics import Summary

MANY = 100_000
"""Optimizer steps that no test waits for."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.txt"


def kill_after(steps: int, kind: signal.Signals) -> Callable[[StepRecord], None]:
    """Return a listener that sends the training process this signal after some optimizer steps."""

    def listen(record: StepRecord) -> None:
        if record.step == steps - 1:
            (training,) = training_processes()
            training.send_signal(kind)

    return listen


@pytest.mark.quick
def test_a_run_gives_the_same_losses_as_in_this_process(log: Path) -> None:
    received = Received()
    result = execute(tiny(), log, [received])
    here: list[object] = []
    train(tiny(), tiny().prepare(), here.append)
    assert result.outcome is Outcome.OK
    assert result.steps == tuple(received.steps)
    assert [r.loss for r in received.steps] == [m.loss for m in here if isinstance(m, StepRecord)]
    assert result.memory is not None and result.finished is not None
    assert result.finished.eval_loss is not None


@pytest.mark.quick
def test_a_peak_over_the_budget_is_an_outcome(log: Path) -> None:
    free = execute(tiny(), log)
    assert free.memory is not None and free.memory.peak_allocated_bytes is not None
    peak = free.memory.peak_allocated_bytes
    tight = execute(tiny(budget=f"{peak / 2**20 - 0.5:.3f}MiB"), log)
    assert tight.outcome is Outcome.OVER_BUDGET
    assert len(tight.steps) == 4
    assert "over the budget" in (tight.detail or "")
    assert execute(tiny(budget=f"{peak / 2**20 + 0.5:.3f}MiB"), log).outcome is Outcome.OK


MESSAGES = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8",
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/",
    "CUDA error: out of memory when calling `cusparseCreate(handle)`",
    "CUDA driver error: out of memory",
    "[enforce fail at alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN Frontend error: execute failed, CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`. If you keep seeing this",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp":1407, please report a bug',
)
OTHERS = (
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA driver error: device not ready",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
)


def fail_with(text: str, experiment: Experiment, prepared: Prepared, emit: Callable[[Any], None]) -> None:
    raise RuntimeError(text)


def test_what_a_library_says_when_memory_is_short_is_out_of_memory(log: Path) -> None:
    for text in MESSAGES:
        expected = Failed(Outcome.OUT_OF_MEMORY, f"RuntimeError: {text.splitlines()[0]}")
        assert failure_of(RuntimeError(text)) == expected
    result = execute(tiny(), log, work=partial(fail_with, text))
    assert (result.outcome, result.detail) == (expected.outcome, expected.detail)


def test_other_errors_of_the_libraries_are_crashes(log: Path) -> None:
    for text in OTHERS:
        assert failure_of(RuntimeError(text)) is None, text
    result = execute(tiny(), log, work=partial(fail_with, text))
    assert result.outcome is Outcome.CRASHED and text in str(result.detail)


def test_each_text_of_an_out_of_memory_error_is_tested() -> None:
    assert all(any(text in message for message in MESSAGES) for text in LIBRARY_TEXTS)


def test_sigkill_from_outside_is_out_of_memory_and_keeps_the_steps(log: Path) -> None:
    result = execute(tiny(num_steps=MANY), log, [Received(kill_after(5, signal.SIGKILL))])
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert "SIGKILL" in (result.detail or "")
    assert [record.step for record in result.steps][:5] == [0, 1, 2, 3, 4]
    assert result.memory is not None and result.memory.peak_allocated_bytes


def test_a_crash_by_signal_names_it(log: Path) -> None:
    result = execute(tiny(num_steps=MANY), log, [Received(kill_after(3, signal.SIGSEGV))])
    assert result.outcome is Outcome.CRASHED
    assert "signal SIGSEGV" in (result.detail or "")


def test_a_signal_without_a_name_is_a_crash_too() -> None:
    assert how_it_ended(-40).detail == "signal 40" and how_it_ended(-signal.SIGSEGV).detail == "signal SIGSEGV"


def test_an_exception_gives_its_exit_code_and_last_lines(log: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text that goes away " * 500)
    experiment = tiny(corpus="text_files", text_files__path=text)
    text.unlink()
    result = execute(experiment, log)
    assert result.outcome is Outcome.CRASHED
    assert (result.detail or "").startswith("exit code 1\n")
    assert "text_files.path must exist" in (result.detail or "")


@pytest.mark.quick
def test_the_time_limit_ends_a_run(log: Path) -> None:
    execute(tiny(), log)  # the server that processes are forked from is up now
    start = time.monotonic()
    result = execute(tiny(num_steps=MANY, time_limit=1.5), log)
    assert result.outcome is Outcome.TIMED_OUT
    assert len(result.steps) > 0
    assert time.monotonic() - start < 20
    assert not training_processes()


def test_ctrl_c_ends_the_process_and_keeps_what_was_measured(log: Path) -> None:
    def interrupt(record: StepRecord) -> None:
        if record.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    result = execute(tiny(num_steps=MANY), log, [Received(interrupt)])
    assert result.outcome is Outcome.INTERRUPTED
    assert len(result.steps) >= 5
    assert not training_processes()


def training_processes() -> list[psutil.Process]:
    """Return the processes of runs: what the fork server has started, and no other test's servers."""
    server = server_pid()
    return psutil.Process(server).children() if server is not None else []


def test_one_run_leaves_nothing_to_the_next(log: Path) -> None:
    first, second = execute(tiny(), log), execute(tiny(), log)
    assert first.memory is not None and second.memory is not None
    assert first.memory.peak_allocated_bytes == second.memory.peak_allocated_bytes
    assert [r.loss for r in first.steps] == [r.loss for r in second.steps]


def emit_collector_state(_: Experiment, __: Prepared, emit: Callable[[Any], None]) -> None:
    emit((gc.isenabled(), gc.get_freeze_count()))


def test_a_run_looks_for_garbage_but_not_in_what_was_loaded(log: Path) -> None:
    received = Received()
    execute(tiny(), log, [received], work=emit_collector_state)
    [(is_enabled, num_frozen)] = received.messages
    assert is_enabled and num_frozen > 100_000


class Events(Received):
    """The names of all events, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.outcomes: list[tuple[Outcome, float | None]] = []

    def started(self, run: Run) -> None:
        assert (run.folder / "config.yaml").exists()
        self.names.append("started")

    def step(self, record: StepRecord) -> None:
        self.names.append("step")
        super().step(record)

    def memory(self, memory: MemoryUse) -> None:
        self.names.append("memory")

    def finished(self, result: Result, summary: Summary) -> None:
        self.names.append("finished")
        self.outcomes.append((result.outcome, summary.metrics.get("peak_allocated_mib")))


def test_a_run_emits_its_events_and_leaves_its_files(tmp_path: Path) -> None:
    events = Events()
    result, summary = run(Run(name="it", runnable=tiny(), folder=tmp_path / "it"), [events])
    assert events.names == ["started", "step", "step", "memory", "step", "step", "memory", "finished"]
    assert events.outcomes == [(Outcome.OK, summary.metrics["peak_allocated_mib"])]
    steps, _ = read_steps(tmp_path / "it" / "steps.jsonl")
    assert [line["values"]["loss"] for line in steps] == [record.loss for record in result.steps]
    kept = json.loads((tmp_path / "it" / "result.json").read_text())
    assert kept["result"]["outcome"] == "ok" and kept["metrics"] == summary.metrics


def test_a_run_stops_when_its_predicate_says_so(tmp_path: Path) -> None:
    this = Run(name="it", runnable=tiny(num_steps=MANY), folder=tmp_path / "it")
    result, _ = run(this, stop=after_five_steps)
    assert (result.outcome, len(result.steps)) == (Outcome.OK, 5)


def after_five_steps(seconds: Sequence[float]) -> bool:
    return len(seconds) >= 5


def test_ctrl_c_reaches_observers_before_the_caller(tmp_path: Path) -> None:
    events = Events()

    def interrupt(record: StepRecord) -> None:
        if record.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    this = Run(name="it", runnable=tiny(num_steps=MANY), folder=tmp_path / "it")
    with pytest.raises(KeyboardInterrupt):
        run(this, [events, Received(interrupt)])
    assert [outcome for outcome, _ in events.outcomes] == [Outcome.INTERRUPTED]
    assert json.loads((tmp_path / "it" / "result.json").read_text())["result"]["outcome"] == "interrupted"


def test_a_run_that_ends_before_an_observer_received_it_ends_with_its_own_error(tmp_path: Path) -> None:
    class Interrupted(Events):
        def started(self, run: Run) -> None:
            super().started(run)
            raise KeyboardInterrupt

    first, second = Interrupted(), Events()
    with pytest.raises(KeyboardInterrupt):
        run(Run(name="it", runnable=tiny(), folder=tmp_path / "it"), [first, second])
    assert (first.names, second.names) == (["started", "finished"], [])


def test_what_a_run_needs_imports_neither_mlflow_nor_optuna_nor_altair() -> None:
    """The process that runs are forked from loads these modules, and a run adds nothing to them.

    Whatever is imported leaves the garbage collector enabled.
    """
    code = (
        "import sys, pipeline.training.loop, pipeline.runtime.run, transformers.models.gpt2.modeling_gpt2\n"
        "bad = {'mlflow', 'optuna', 'altair', 'vl_convert', 'pandas'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "import gc, pipeline.prediction.predict, pipeline.jobs.search\n"
        "assert gc.isenabled()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def cuda_result(card: str | None, log: Path, **settings: object) -> Result:
    return execute_on(card, tiny(**{"device": "cuda", **settings}), log)


@pytest.mark.gpu
@pytest.mark.parametrize("card", EACH_CARD)
def test_a_cuda_run_measures_all_kinds_of_memory(card: str | None, log: Path) -> None:
    result = cuda_result(card, log)
    assert result.outcome is Outcome.OK, result.detail
    memory = result.memory
    assert memory is not None
    assert memory.peak_allocated_bytes and memory.peak_reserved_bytes and memory.peak_device_bytes
    assert memory.peak_allocated_bytes <= memory.peak_reserved_bytes < memory.peak_device_bytes
    assert memory.allocation_retries == 0
    if card is not None:
        assert memory.peak_device_bytes - memory.peak_reserved_bytes == find_card(card).context.mib * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("card", EACH_CARD)
def test_a_budget_is_a_hard_cap_on_cuda(card: str | None, log: Path) -> None:
    result = cuda_result(card, log, budget="24MiB", micro_batch_size=64, sequence_length=256)
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert result.memory is not None and result.memory.peak_reserved_bytes is not None
    assert result.memory.peak_reserved_bytes <= 24 * 2**20


@pytest.mark.gpu
@pytest.mark.needs_numbers
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_cuda_and_cpu_learn_the_same(precision: str, log: Path) -> None:
    on_cpu, on_cuda = execute(tiny(), log), cuda_result(None, log, precision=precision)
    assert on_cuda.outcome is Outcome.OK, on_cuda.detail
    assert [r.loss for r in on_cuda.steps] == pytest.approx([r.loss for r in on_cpu.steps], rel=5e-3)
