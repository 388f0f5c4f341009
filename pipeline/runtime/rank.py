"""The ranks of a run: processes of its child process, which join each other, take their devices and train.

torch starts a process for each rank, ends all of them when one fails, and restarts none. On one machine the ranks meet
at a file, and their sockets are those of the loopback device; on several they meet at torchrun's store.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, MutableSequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from pipeline.base.files import LAST_LINES
from pipeline.base.machines import this_machine
from pipeline.base.ranks import CollectiveEntered
from pipeline.base.results import MemoryUse, Outcome
from pipeline.config.experiment import Experiment
from pipeline.runtime.failures import Failed, failure_of, how_it_ended
from pipeline.runtime.fork_server import end_with_parent

Work = Callable[[Any, Any, Callable[[Any], None]], None]
"""What a run's process, or each of its ranks, does: (experiment, its corpus, emit) -> None."""
Progress = MutableSequence[int]
"""How many collective operations each rank of this machine has entered, in memory that the processes share."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that name the network device of the ranks' sockets."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""torch.distributed's backends by device; gloo exchanges what is on the host."""
REPORTED = 3
"""Exit code of a rank that has sent what happened to it."""
SECONDS_FOR_OTHERS = 10.0
"""How long a rank that has lost another one waits to be ended: the other one must be seen first."""


def launch_ranks(
    experiment: Experiment, work: Work, send: Callable[[Any], None], progress: Progress, rendezvous_file: Path
) -> None:
    """Do `work` in this machine's ranks of the experiment; send rank 0's events, and what happened if a rank failed.

    `progress` gets how many collective operations each has entered. Those of one machine meet at `rendezvous_file`.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the CUDA runtime must not be asked before a fork
    machine, count = this_machine(), experiment.num_ranks_here
    first, meet_at = machine.number * count, "env://"
    if machine.is_alone:
        meet_at = f"file://{rendezvous_file}"
        for variable in SOCKETS:
            os.environ.setdefault(variable, LOOPBACK)
    lock = multiprocessing.get_context("fork").Lock()
    own = (first, experiment, work, send, lock, progress, meet_at)
    try:  # forked from this process, which is clean and has imported torch
        start_processes(rank_main, own, count, start_method="fork")  # type: ignore[no-untyped-call]
    except ProcessExitedException as error:
        if error.exit_code != REPORTED:
            send(how_it_ended(error.exit_code, f"rank {first + error.error_index}: "))


def rank_main(
    number: int,
    first: int,
    experiment: Experiment,
    work: Work,
    send: Callable[[Any], None],
    lock: AbstractContextManager[Any],
    progress: Progress,
    meet_at: str,
) -> None:
    """Do `work` as one of the ranks, `number` of those of this machine; end the process with REPORTED if it fails."""
    rank = first + number
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(number), "WORLD_SIZE": str(experiment.world_size)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    emit = _Emit(rank, number, send, lock, progress)
    try:
        _join(experiment, rank, meet_at)
        own = experiment.on_device(f"cuda:{number}") if experiment.device.type == "cuda" else experiment
        work(own, own.prepare(), emit)
        dist.destroy_process_group()
    except BaseException as error:
        traceback.print_exc()
        failure = failure_of(error)
        if failure is None and _is_of_another_rank(error):
            time.sleep(SECONDS_FOR_OTHERS)
        emit.failed(failure or Failed(Outcome.CRASHED, "\n".join(traceback.format_exc().splitlines()[-LAST_LINES:])))
        os._exit(REPORTED)  # without waiting for operations that others will never enter


def _join(experiment: Experiment, rank: int, meet_at: str) -> None:
    """Wait for the other ranks; on a CPU take a share of its cores."""
    kind, world_size = experiment.device.type, experiment.world_size
    if experiment.num_threads is not None:
        torch.set_num_threads(experiment.num_threads)
    dist.init_process_group(BACKENDS[kind], init_method=meet_at, rank=rank, world_size=world_size)


class _Emit:
    """Sends the events of rank 0; of another rank, only its memory and what happened if it fails."""

    def __init__(
        self,
        rank: int,
        number: int,
        send: Callable[[Any], None],
        lock: AbstractContextManager[Any],
        progress: Progress,
    ) -> None:
        self._rank, self._number, self._send, self._lock, self._progress = rank, number, send, lock, progress
        self._memory: MemoryUse | None = None

    def __call__(self, event: Any) -> None:
        """Receive an event of the training."""
        if isinstance(event, CollectiveEntered):
            self._progress[self._number] += 1
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
