"""The launcher of a run with several ranks: torchrun's, in the run's child process.

It starts a process for each rank, ends all of them when one fails, and restarts none (torch.distributed.elastic). All
is on one machine: the ranks meet at a file, and their sockets are those of the loopback device.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipeline.base.results import Outcome
from pipeline.config.experiment import Experiment
from pipeline.runtime.failures import Failed, killed
from pipeline.runtime.rank import REPORTED, Progress, Work, rank_main

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that name the network device of the ranks' sockets."""
HERE = "fitproof"
"""Name of the rendezvous of a single machine."""


class _OnThisMachine(RendezvousHandler):
    """A rendezvous of the one launcher with itself: its store is in its own memory, and it opens no port."""

    def __init__(self, _: RendezvousParameters) -> None:
        """Take no parameters: there is nobody to meet."""

    def get_backend(self) -> str:
        return HERE

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return HERE

    def shutdown(self) -> bool:
        return True


def launch_ranks(
    experiment: Experiment, work: Work, send: Callable[[Any], None], progress: Progress, rendezvous_file: Path
) -> None:
    """Do `work` in all ranks of the experiment; send the events of rank 0, and what happened if a rank failed.

    `progress` gets how many collective operations each rank has entered. The ranks meet at `rendezvous_file`.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the CUDA runtime must not be asked before a fork
    for variable in SOCKETS:
        os.environ.setdefault(variable, LOOPBACK)
    rendezvous_handler_registry.register(HERE, _OnThisMachine)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=experiment.world_size,
        run_id=HERE,
        rdzv_backend=HERE,
        max_restarts=0,
        start_method="fork",  # of this process, which is clean and has imported torch
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # by default a folder in /tmp, which stays
    )
    lock = multiprocessing.get_context("fork").Lock()
    try:
        elastic_launch(config, rank_main)(experiment, work, send, lock, progress, rendezvous_file)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != REPORTED:
            send(_how_it_ended(rank, failure.exitcode))


def _how_it_ended(rank: int, exit_code: int) -> Failed:
    """Return how a rank ended that could not say it itself."""
    who = f"rank {rank}: "
    return killed(exit_code, who) if exit_code < 0 else Failed(Outcome.CRASHED, f"{who}exit code {exit_code}")
