"""Processes of the operating system, with those that they have started."""

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

import psutil


def unreadable() -> BinaryIO:
    """Return a stdin of which every read is an error: a script that asks until it is answered would never end."""
    return Path(os.devnull).open("wb")


def kill_family(pid: int, timeout_seconds: float) -> None:
    """Kill a process and its descendants, and wait for the descendants; its own starter has to wait for the process."""
    try:
        parent = psutil.Process(pid)
        descendants = parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in (parent, *descendants):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(descendants, timeout=timeout_seconds)


def kill_those_with(variable: str, value: str) -> None:
    """Kill the processes that were started with this variable of the environment, whoever has started them."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # of another user, or ended
            if process.environ().get(variable) == value:
                process.kill()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(cores())


def cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
