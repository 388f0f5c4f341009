"""Real processes of a test: started, waited for, and ended whatever happens."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from project import Project  # the processes of tests that import this module have no use for MLflow


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 180, pause: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(pause)


def wait_for_the_end(family: Sequence[psutil.Process]) -> None:
    """Wait until none of these processes runs any more."""
    wait_for(lambda: not any(map(_runs, family)), "the end of its processes")


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Return the processes of this machine that were started with this environment variable."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value and _runs(process):
                found.append(process)
    return found


def command_line(process: psutil.Process) -> str:
    """Return a process's command line; nothing if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def started(project: "Project", *words: str, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Give a command that is running, in a process group of its own, and end it whatever happens."""
    with project.popen(*words, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def interrupted(process: "subprocess.Popen[str]", kind: signal.Signals = signal.SIGINT) -> str:
    """Press Ctrl-C in a process's terminal, or send it another signal; return what it has written to stderr.

    Nothing that it has started may go on.
    """
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, kind) if kind is signal.SIGINT else process.send_signal(kind)
    _, err = process.communicate(timeout=60)
    wait_for_the_end(family)
    return str(err)


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
