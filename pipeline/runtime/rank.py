"""The process of one rank: it joins the other ranks, takes its device, trains, and sends what the parent needs."""

import os
import signal
import time
import traceback
from collections.abc import Callable, MutableSequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.base.ranks import CollectiveEntered
from pipeline.base.results import MemoryUse, Outcome
from pipeline.config.experiment import Experiment
from pipeline.runtime.failures import Failed, failure_of
from pipeline.runtime.fork_server import end_with_parent

Work = Callable[[Any, Any, Callable[[Any], None]], None]
"""What a run's process, or each of its ranks, does: (experiment, its corpus, emit) -> None."""
Progress = MutableSequence[int]
"""How many collective operations each rank has entered, in memory that the processes share."""

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""torch.distributed's backends by device; gloo exchanges what is on the host."""
REPORTED = 3
"""Exit code of a rank that has sent what happened to it."""
SECONDS_FOR_OTHERS = 10.0
"""How long a rank that has lost another one waits to be ended: the launcher must see the lost one first."""
LAST_LINES = 5
"""Last lines of what a process printed that are kept when it crashes."""


def rank_main(
    experiment: Experiment,
    work: Work,
    send: Callable[[Any], None],
    lock: AbstractContextManager[Any],
    progress: Progress,
    rendezvous_file: Path,
) -> None:
    """Do `work` as the rank that torchrun's launcher has made this process; end it with REPORTED if it fails."""
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's own, which was forked, waits for Python to run
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    emit = _Emit(rank, send, lock, progress)
    try:
        _join(experiment, rank, rendezvous_file)
        own = experiment.on_device(f"cuda:{rank}") if experiment.device.type == "cuda" else experiment
        work(own, own.prepare(), emit)
        dist.destroy_process_group()
    except BaseException as error:
        traceback.print_exc()
        failure = failure_of(error)
        if failure is None and _is_of_another_rank(error):
            time.sleep(SECONDS_FOR_OTHERS)
        emit.failed(failure or Failed(Outcome.CRASHED, "\n".join(traceback.format_exc().splitlines()[-LAST_LINES:])))
        os._exit(REPORTED)  # without waiting for operations that others will never enter


def _join(experiment: Experiment, rank: int, rendezvous_file: Path) -> None:
    """Wait for the other ranks; on a CPU take a share of its cores."""
    kind, world_size = experiment.device.type, experiment.world_size
    if experiment.num_threads is not None:
        torch.set_num_threads(experiment.num_threads)
    dist.init_process_group(BACKENDS[kind], init_method=f"file://{rendezvous_file}", rank=rank, world_size=world_size)


class _Emit:
    """Sends the events of rank 0; of another rank, only its memory and what happened if it fails."""

    def __init__(
        self, rank: int, send: Callable[[Any], None], lock: AbstractContextManager[Any], progress: Progress
    ) -> None:
        self._rank, self._send, self._lock, self._progress = rank, send, lock, progress
        self._memory: MemoryUse | None = None

    def __call__(self, event: Any) -> None:
        """Receive an event of the training."""
        if isinstance(event, CollectiveEntered):
            self._progress[self._rank] += 1
            return
        if isinstance(event, MemoryUse):
            self._memory = event
        if self._rank == 0:
            self._send_one(event)

    def failed(self, failure: Failed) -> None:
        """Send that this rank has failed; a loss is of all ranks."""
        if self._memory is not None:
            self._send_one(self._memory)
        who = "" if failure.outcome is Outcome.DIVERGED else f"rank {self._rank}: "
        self._send_one(Failed(failure.outcome, f"{who}{failure.detail}"))

    def _send_one(self, event: Any) -> None:
        with self._lock:  # all ranks write to one pipe
            self._send(event)


def _is_of_another_rank(error: BaseException) -> bool:
    """Whether an error says that an operation failed because of another rank."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
