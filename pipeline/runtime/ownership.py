"""The process that owns a trial or a run: on this or another machine, and whether it still exists."""

import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil

SECONDS_OF_DRIFT = 2.0
"""Tolerance for the start time of a process: Linux derives it from a boot time that clock adjustments move."""


def this_process() -> dict[str, Any]:
    """Return what identifies this process: host, process id and start time."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def is_here(owner: Mapping[str, Any]) -> bool:
    """Return whether the owner is a process of this machine."""
    return bool(owner["host"] == socket.gethostname())


def is_gone(owner: Mapping[str, Any]) -> bool:
    """Return whether the process has ended; False for processes of other machines, about which nothing is known."""
    if not is_here(owner):
        return False
    try:
        process = psutil.Process(owner["pid"])
        another = abs(process.create_time() - owner["started"]) > SECONDS_OF_DRIFT
        return another or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
