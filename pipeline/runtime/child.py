"""The child process of a run: it trains and sends events to the parent."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from pipeline.base.contracts import Prepared
from pipeline.base.errors import first_line
from pipeline.base.results import Outcome
from pipeline.config.experiment import Experiment
from pipeline.runtime.fork_server import loaded
from pipeline.runtime.placement import Placement
from pipeline.training.loop import DivergedError

OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",  # c10/core/impl/alloc_cpu.cpp
    "CUDA error: out of memory",  # c10_cuda_check_implementation, and cuSPARSE's CUSPARSE_STATUS_ALLOC_FAILED
    "CUDA driver error: out of memory",  # C10_CUDA_DRIVER_CHECK: expandable segments, memory pools
    "CUBLAS_STATUS_ALLOC_FAILED",  # TORCH_CUDABLAS_CHECK
    "CUDNN_STATUS_ALLOC_FAILED",  # AT_CUDNN_CHECK; up to cuDNN 8
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",  # its name from cuDNN 9 on (cudnn_graph.h)
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",  # TORCH_CUSOLVER_CHECK
    "CUFFT_ALLOC_FAILED",  # CUFFT_CHECK
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",  # the report of an OutOfMemoryError fails on MIG: pytorch issue 112377
)
"""Texts of out-of-memory errors that are not torch.OutOfMemoryError, with torch's macro that writes them.

cuDNN's front end passes the name of the status on; its plans' workspaces are allocated by torch.
"""
Work = Callable[[Experiment, Prepared, Callable[[Any], None]], None]
"""What the process does: (experiment, its corpus, emit) -> None."""


@dataclass(frozen=True)
class Failed:
    """The last event of a run that did not finish."""

    outcome: Outcome
    detail: str


def child_main(experiment: Experiment, sender: Connection, log_file: Path, work: Work, placement: Placement) -> None:
    """Run the experiment in this process and send its events to the parent."""
    loaded()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    _redirect_output(log_file)
    _be_killed_first()
    os.environ.update({**placement.environment, **experiment.environment})
    if placement.cores is not None:
        os.sched_setaffinity(0, placement.cores)
        torch.set_num_threads(len(placement.cores))
    try:
        work(experiment, experiment.prepare(), sender.send)
    except DivergedError as error:
        sender.send(Failed(Outcome.DIVERGED, str(error)))
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        sender.send(Failed(Outcome.OUT_OF_MEMORY, f"{type(error).__name__}: {first_line(error)}"))


def _is_out_of_memory(error: BaseException) -> bool:
    known: tuple[type[Any], ...] = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, known) or any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


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
