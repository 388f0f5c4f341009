"""Runs experiments and commands in clean processes: out of memory, a crash, a time-out are outcomes, not exceptions."""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import last_lines
from pipeline.base.machines import this_machine
from pipeline.base.processes import kill_family
from pipeline.base.results import Finished, MemoryUse, Outcome, Result, StepRecord
from pipeline.base.units import MIB
from pipeline.config.command import Command, Runnable
from pipeline.config.experiment import Experiment
from pipeline.runtime.child import child_main
from pipeline.runtime.command import run_command
from pipeline.runtime.failures import Failed, how_it_ended
from pipeline.runtime.fork_server import CONTEXT, starting_processes
from pipeline.runtime.observer import Observer, Run
from pipeline.runtime.placement import ANYWHERE, Placement
from pipeline.runtime.rank import Work
from pipeline.runtime.run_folder import LOG, RunFolder
from pipeline.runtime.watch import Watch
from pipeline.training.loop import Stop, never_stop, train
from pipeline.training.metrics import Summary, summarize
from pipeline.training.typical_step import typical_step

Summarize = Callable[[Result], Summary]
SECONDS_TO_END = 30.0
"""How long a process may take to end after its last event, or after it was killed."""


class WorkerLostError(RuntimeError):
    """The process that hosted a run died, or its machine: the run may be measured again."""


class Execute(Protocol):
    """Runs an Experiment or a Command in a clean process: `execute`, or a function like it for another machine."""

    def __call__(
        self,
        runnable: Runnable,
        log_file: Path,
        observers: Sequence[Observer] = (),
        *,
        work: Work | None = None,
        stop: Stop = never_stop,
        cancelled: threading.Event | None = None,
    ) -> Result:
        """Return the result; `log_file` has what the process printed, and the observers receive its events.

        Another thread ends the process by setting `cancelled`.
        """


@dataclass
class _Received:
    """The events of a run so far."""

    steps: list[StepRecord] = field(default_factory=list)
    memory: MemoryUse | None = None
    finished: Finished | None = None
    failed: Failed | None = None


def run(
    this: Run,
    observers: Sequence[Observer] = (),
    *,
    stop: Stop = never_stop,
    work: Work | None = None,
    then: Work | None = None,
    summarize: Summarize | None = None,
    executor: Execute | None = None,
    cancelled: threading.Event | None = None,
) -> tuple[Result, Summary]:
    """Train in a clean process, write the results into the run's folder, and emit every event to the observers.

    `work` is what the process does, by default it trains until `stop` returns True. `then` is further work in a second
    clean process; if it fails, the run fails as well. `summarize` returns the summary metrics of a result, by default
    those that were measured. `executor` runs the processes, by default on this machine; `cancelled` ends them.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; what was measured is written and emitted before.
        InvalidInputError: the folder cannot be written.

    """
    folder, runnable, execute_it = RunFolder(this), this.runnable, executor or execute
    folder.write_config()
    measured: Result | None = None
    aborted = "aborted before it was measured"
    result, summary = Result(outcome=Outcome.INTERRUPTED, detail=aborted, seconds_total=0.0), Summary({})
    receiving: list[Observer] = []
    try:
        for observer in observers:
            receiving.append(observer)
            observer.started(this)
        measured = execute_it(
            runnable, this.folder / LOG, [folder, *observers], work=work, stop=stop, cancelled=cancelled
        )
        if then is not None and measured.outcome is not Outcome.INTERRUPTED:
            further = execute_it(runnable, this.folder / "traces" / LOG, observers, work=then, cancelled=cancelled)
            measured = _with(further, measured)
        concluded = summarize(measured) if summarize else measured_summary(runnable, measured)
        folder.write_result(measured, concluded)
        result, summary = measured, concluded
    except BaseException:
        if measured is not None:  # what was measured is kept, without what summarize() adds
            with contextlib.suppress(InvalidInputError):
                concluded = measured_summary(runnable, measured)
                folder.write_result(measured, concluded)
                result, summary = measured, concluded
        raise
    finally:
        for observer in receiving:
            observer.finished(result, summary)
    if result.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    return result, summary


def measured_summary(runnable: Runnable, result: Result) -> Summary:
    """Return the metrics that a run measured."""
    share = 1.0
    if isinstance(runnable, Experiment):
        share = typical_step(runnable, runnable.read_corpus()).tokens_per_position
    return Summary(summarize(result, runnable.effective_batch_size, runnable.timing_warmup_steps, share))


def execute(
    runnable: Runnable,
    log_file: Path,
    observers: Sequence[Observer] = (),
    *,
    work: Work | None = None,
    stop: Stop = never_stop,
    placement: Placement = ANYWHERE,
    cancelled: threading.Event | None = None,
) -> Result:
    """Train, or do other `work`, in a clean process whose output goes to `log_file`; observers receive its events.

    Ctrl-C ends the process, as `cancelled` does that another thread sets; the result has the outcome `interrupted` and
    what was measured until then.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    received = _Received()
    receiver, sender = CONTEXT.Pipe(duplex=False)
    progress = CONTEXT.RawArray("Q", runnable.num_ranks_here)
    folder = tempfile.TemporaryDirectory()  # of this process, which outlives one that is killed
    rendezvous_file = Path(folder.name, "store")
    if work is None and isinstance(runnable, Command):
        work = partial(run_command, stop=stop, folder=Path(folder.name))
    work = work or partial(train, stop=stop)
    variables = dict(os.environ)
    arguments = (runnable, sender, log_file, work, placement, progress, rendezvous_file, variables)
    # a daemonic process could not start its ranks
    process = CONTEXT.Process(target=child_main, args=arguments, daemon=not runnable.num_ranks_here)
    start = time.monotonic()
    try:
        with starting_processes():
            process.start()  # the first time, this waits until the fork server has imported torch and transformers
        start = time.monotonic()  # without that wait
        sender.close()
        first_rank = this_machine().number * runnable.num_ranks_here
        watch = Watch(runnable.time_limit, progress, first_rank)
        if reason := _receive_all(receiver, received, observers, watch, cancelled):
            _kill(process)
            received.failed = Failed(Outcome.TIMED_OUT, reason)
    except KeyboardInterrupt:
        _kill(process)
        received.failed = Failed(Outcome.INTERRUPTED, f"interrupted after {len(received.steps)} optimizer steps")
    except BaseException:
        _kill(process)
        raise
    finally:
        _await_end(process)
        receiver.close()
        folder.cleanup()
    outcome, detail = _judge(runnable, received, process.exitcode, log_file)
    return Result(
        outcome=outcome,
        detail=detail,
        steps=tuple(received.steps),
        memory=received.memory,
        finished=received.finished,
        seconds_total=time.monotonic() - start,
    )


def _with(further: Result, result: Result) -> Result:
    """Return the result with the failure of further work, if it failed and the run itself did not."""
    if further.outcome is Outcome.OK or not result.outcome.completed:
        return result
    return replace(result, outcome=further.outcome, detail=f"while it was profiled: {further.detail}")


def _receive_all(
    receiver: Connection,
    received: _Received,
    observers: Sequence[Observer],
    watch: Watch,
    cancelled: threading.Event | None,
) -> str | None:
    """Receive events until the process has closed its end (None) or takes too long: then return why.

    Raises:
        KeyboardInterrupt: `cancelled` was set.

    """
    while True:
        if cancelled is not None and cancelled.is_set():
            raise KeyboardInterrupt
        if not receiver.poll(watch.seconds_to_wait()):
            if reason := watch.why_too_long():
                return reason
            continue
        try:
            event = receiver.recv()
        except (EOFError, OSError):  # the end, or the end in the middle of an event
            return None
        if isinstance(event, StepRecord):
            received.steps.append(event)
        elif isinstance(event, MemoryUse):
            received.memory = event
        elif isinstance(event, Finished):
            received.finished = event
        elif isinstance(event, Failed):
            received.failed = event
        for observer in observers:
            observer.receive(event)


def _kill(process: BaseProcess) -> None:
    """Kill a process, if it was started, and its ranks: one that hangs does not end by itself."""
    if process.pid is not None:
        kill_family(process.pid, SECONDS_TO_END)


def _await_end(process: BaseProcess) -> None:
    """Wait until a process has ended, if it was started; kill it if it has not after its last event."""
    if process.pid is None:
        return
    process.join(timeout=SECONDS_TO_END)
    if process.is_alive():
        _kill(process)
        process.join()


def _judge(
    runnable: Runnable, received: _Received, exit_code: int | None, log_file: Path
) -> tuple[Outcome, str | None]:
    """Return the outcome of a process that has ended, and the reason if it failed."""
    if received.failed is not None:
        return received.failed.outcome, received.failed.detail
    if received.finished is None and exit_code != 0:
        end = how_it_ended(exit_code)
        said = last_lines(log_file) if end.outcome is Outcome.CRASHED else []
        return end.outcome, "\n".join([end.detail, *said])
    budget = runnable.budget_bytes
    peak = received.memory.peak_bytes if received.memory else None
    if budget is not None and peak is not None and peak > budget:
        return Outcome.OVER_BUDGET, f"its peak of {peak / MIB:,.1f} MiB is over the budget of {budget / MIB:,.1f} MiB"
    return Outcome.OK, None
