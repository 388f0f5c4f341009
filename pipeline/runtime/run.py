"""An Experiment in a clean process -> Result: whatever becomes of the process, the outcome is a value."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from pipeline.base.contracts import Prepared
from pipeline.base.results import Finished, MemoryUse, Outcome, Result, StepRecord
from pipeline.config.experiment import Experiment
from pipeline.runtime.fork_server import CONTEXT, loaded, without_main
from pipeline.training.loop import DivergedError, train

OUT_OF_MEMORY_TEXTS = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
)
"""What out-of-memory says where it does not raise torch.OutOfMemoryError."""
Work = Callable[[Experiment, Prepared, Callable[[Any], None]], None]
"""What a fresh process does: it is given an experiment with its corpus, and tells messages."""
LAST_LINES = 5
"""Lines of a crashed run's stderr that are kept in its result."""


@dataclass(frozen=True)
class Failed:
    """The last message of a run that did not finish."""

    outcome: Outcome
    detail: str


@dataclass
class _Received:
    """What a run has told so far."""

    steps: list[StepRecord] = field(default_factory=list)
    memory: MemoryUse | None = None
    finished: Finished | None = None
    failed: Failed | None = None


def execute(
    experiment: Experiment,
    log_file: Path,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    work: Work = train,
    on_other: Callable[[Any], None] = lambda message: None,
) -> Result:
    """Train in a fresh process; its output goes to `log_file`, and `on_step` hears of each optimizer step.

    Other `work` than training may be done there; `on_other` hears what it tells beside the messages of training.
    Ctrl-C ends the process and gives a Result with outcome `interrupted` and what was measured until then.
    """
    received = _Received()
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_run, args=(experiment, sender, log_file, work), daemon=True)
    with without_main():
        process.start()  # the first time, this waits for the server to have loaded torch and transformers
    start = time.monotonic()
    sender.close()
    limit = experiment.settings.time_limit
    try:
        if not _listen(receiver, received, on_step, on_other, None if limit is None else start + limit):
            process.kill()
            received.failed = Failed(Outcome.TIMED_OUT, f"ended after its time_limit of {limit:g} seconds")
    except KeyboardInterrupt:
        process.kill()
        received.failed = Failed(Outcome.INTERRUPTED, f"interrupted after {len(received.steps)} optimizer steps")
    finally:
        _await_end(process)
        receiver.close()
    outcome, detail = _judge(experiment, received, process.exitcode, log_file)
    return Result(
        outcome=outcome,
        detail=detail,
        steps=tuple(received.steps),
        memory=received.memory,
        finished=received.finished,
        seconds_total=time.monotonic() - start,
    )


def _listen(
    receiver: Connection,
    received: _Received,
    on_step: Callable[[StepRecord], None],
    on_other: Callable[[Any], None],
    deadline: float | None,
) -> bool:
    """Take in messages until the run has closed its end (True) or the deadline has passed (False)."""
    while True:
        if not receiver.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
            return False
        try:
            message = receiver.recv()
        except (EOFError, OSError):  # the end, or the end in the middle of a message
            return True
        if isinstance(message, StepRecord):
            received.steps.append(message)
            on_step(message)
        elif isinstance(message, MemoryUse):
            received.memory = message
        elif isinstance(message, Finished):
            received.finished = message
        elif isinstance(message, Failed):
            received.failed = message
        else:
            on_other(message)


def _await_end(process: BaseProcess) -> None:
    """Wait for a process that has said its last word, and kill it where it lingers."""
    process.join(timeout=30)
    if process.is_alive():
        process.kill()
        process.join()


def _judge(
    experiment: Experiment, received: _Received, exit_code: int | None, log_file: Path
) -> tuple[Outcome, str | None]:
    if received.failed is not None:
        return received.failed.outcome, received.failed.detail
    if received.finished is None and exit_code != 0:
        if exit_code == -signal.SIGKILL:
            return Outcome.OUT_OF_MEMORY, "killed by SIGKILL, as the kernel does when the machine's memory is used up"
        return Outcome.CRASHED, _how_it_died(exit_code, log_file)
    budget = experiment.budget_bytes
    peak = received.memory.peak_allocated_bytes if received.memory else None
    if budget is not None and peak is not None and peak > budget:
        return (
            Outcome.OVER_BUDGET,
            f"its peak of {peak / 2**20:,.1f} MiB is over the budget of {budget / 2**20:,.1f} MiB",
        )
    return Outcome.OK, None


def _how_it_died(exit_code: int | None, log_file: Path) -> str:
    by_signal = exit_code is not None and exit_code < 0
    end = f"signal {signal.Signals(-(exit_code or 0)).name}" if by_signal else f"exit code {exit_code}"
    log = log_file.read_text(errors="replace") if log_file.exists() else ""
    lines = [line for line in log.splitlines() if line.strip()]
    return "\n".join([end, *lines[-LAST_LINES:]])


def _run(experiment: Experiment, sender: Connection, log_file: Path, work: Work) -> None:
    """Be the fresh process."""
    loaded()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    _redirect_output(log_file)
    _be_the_first_to_go()
    try:
        work(experiment, experiment.prepare(), sender.send)
    except DivergedError as error:
        sender.send(Failed(Outcome.DIVERGED, str(error)))
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        first = (str(error).splitlines() or [""])[0]
        sender.send(Failed(Outcome.OUT_OF_MEMORY, f"{type(error).__name__}: {first}"))


def _is_out_of_memory(error: BaseException) -> bool:
    known: tuple[type[Any], ...] = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, known) or any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def _redirect_output(log_file: Path) -> None:
    """Send everything that this process prints, its libraries' C code included, to a file."""
    with log_file.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)


def _be_the_first_to_go() -> None:
    """Ask Linux to kill this process, not its parent, when the machine's memory is used up (proc(5), oom_score_adj)."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        score.write_text("1000")
