"""Whose a trial or a run is: a process of this or another machine, and whether it is gone."""

import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil

SECONDS_OF_DRIFT = 2.0
"""How far two readings of a process's start may lie apart: Linux counts it from a boot time that the clock moves."""


def this_process() -> dict[str, Any]:
    """Return what tells this process from every other: host, pid and start."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def is_here(owner: Mapping[str, Any]) -> bool:
    """Whether it is a process of this machine."""
    return bool(owner["host"] == socket.gethostname())


def is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether the process is known to be gone: of other machines nothing is known."""
    if not is_here(owner):
        return False
    try:
        process = psutil.Process(owner["pid"])
        another = abs(process.create_time() - owner["started"]) > SECONDS_OF_DRIFT
        return another or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
