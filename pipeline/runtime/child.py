"""The child process of a run: it trains, or launches the ranks that do, and sends events to the parent."""

import contextlib
import os
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from pipeline.config.command import Runnable
from pipeline.config.experiment import Experiment
from pipeline.runtime.failures import failure_of
from pipeline.runtime.fork_server import begin_child
from pipeline.runtime.placement import Placement
from pipeline.runtime.rank import Progress, Work, launch_ranks


def child_main(
    runnable: Runnable,
    sender: Connection,
    log_file: Path,
    work: Work,
    placement: Placement,
    progress: Progress,
    rendezvous_file: Path,
    variables: Mapping[str, str],
) -> None:
    """Run the Experiment or Command in this process, or in its ranks, and send its events to the parent.

    `variables` are the parent's environment variables; those of the placement and of what runs replace them.
    """
    begin_child(variables)
    _redirect_output(log_file)
    _be_killed_first()
    os.environ.update({**placement.environment, **runnable.environment})
    if placement.cores is not None:
        os.sched_setaffinity(0, placement.cores)
        torch.set_num_threads(len(placement.cores))
    if isinstance(runnable, Experiment) and runnable.num_ranks_here:
        launch_ranks(runnable, work, sender.send, progress, rendezvous_file)
        return
    try:
        work(runnable, runnable.prepare(), sender.send)
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        sender.send(failure)


def _redirect_output(log_file: Path) -> None:
    """Redirect everything that this process prints, C libraries included, to a file."""
    with log_file.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)


def _be_killed_first() -> None:
    """Ask Linux to kill this process, not its parent, when the machine's memory is used up (proc(5), oom_score_adj)."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        score.write_text("1000")
