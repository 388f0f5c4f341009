"""What went wrong in a process of a run: out of memory, divergence, a crash."""

import signal
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.base.errors import first_line
from pipeline.base.results import Outcome
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


@dataclass(frozen=True)
class Failed:
    """The last event of a run that did not finish."""

    outcome: Outcome
    detail: str


def failure_of(error: BaseException) -> Failed | None:
    """Return the outcome that an error is; None if it is a crash, of which the traceback says more."""
    if isinstance(error, DivergedError):
        return Failed(Outcome.DIVERGED, str(error))
    if is_out_of_memory(error):
        return Failed(Outcome.OUT_OF_MEMORY, f"{type(error).__name__}: {first_line(error)}")
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on the host or on a device."""
    known: tuple[type[Any], ...] = (torch.OutOfMemoryError, MemoryError)
    is_known_text = isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)
    return isinstance(error, known) or is_known_text


def killed(exit_code: int, who: str = "") -> Failed:
    """Return what the end of a process by a signal is, from its negative exit code; `who` is its name, if any."""
    if exit_code == -signal.SIGKILL:
        return Failed(Outcome.OUT_OF_MEMORY, f"{who}killed by SIGKILL, probably by the kernel for lack of memory")
    return Failed(Outcome.CRASHED, f"{who}signal {signal.Signals(-exit_code).name}")
