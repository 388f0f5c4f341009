"""What went wrong in a process of a run: out of memory, divergence, a crash."""

import signal
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.base.errors import first_line
from pipeline.base.results import Outcome
from pipeline.memory.out_of_memory import LIBRARY_TEXTS
from pipeline.training.loop import DivergedError


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
    is_known_text = isinstance(error, RuntimeError) and any(text in str(error) for text in LIBRARY_TEXTS)
    return isinstance(error, known) or is_known_text


def how_it_ended(exit_code: int | None, who: str = "") -> Failed:
    """Return what the end of a process is that could not say it itself, from its exit code; `who` is its name, if any.

    An exit code is negative if a signal ended the process.
    """
    if exit_code is None or exit_code >= 0:
        return Failed(Outcome.CRASHED, f"{who}exit code {exit_code}")
    if exit_code == -signal.SIGKILL:
        return Failed(Outcome.OUT_OF_MEMORY, f"{who}killed by SIGKILL, probably by the kernel for lack of memory")
    is_named = -exit_code in {each.value for each in signal.Signals}  # but for most of the real-time ones
    return Failed(Outcome.CRASHED, f"{who}signal {signal.Signals(-exit_code).name if is_named else -exit_code}")
