"""What Ctrl-C does to a command: before anything is begun it ends at once, from then on in order."""

import atexit
import os
import signal

import psutil

INTERRUPTED = 130
"""Exit code of a shell's Ctrl-C: 128 + SIGINT."""
STOPS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what `mlflow run` answers it with."""
SHOW_CURSOR = b"\x1b[?25h\n"
"""What a terminal is told after a progress line that hid its cursor."""


def stop_at_once() -> None:
    """End the command on a signal without further ado; an exception could be lost in whatever is being loaded."""
    for kind in STOPS:
        signal.signal(kind, _leave)


def stop_in_order() -> None:
    """Let a signal become KeyboardInterrupt from here on, since something is begun; in a command, and nowhere else."""
    if signal.getsignal(signal.SIGINT) is _leave:
        for kind in STOPS:
            signal.signal(kind, _interrupt)


def stop_no_more() -> None:
    """Let no signal disturb the end."""
    for kind in STOPS:
        signal.signal(kind, signal.SIG_IGN)


def _leave(*_: object) -> None:
    stop_no_more()
    for process in psutil.Process().children(recursive=True):
        process.kill()
    stdout, stderr = 1, 2  # the files themselves: their Python objects may be in the middle of a line
    if os.isatty(stdout):
        os.write(stdout, SHOW_CURSOR)
    os.write(stderr, b"interrupted: nothing was begun\n")
    atexit._run_exitfuncs()
    os._exit(INTERRUPTED)


def _interrupt(*_: object) -> None:
    """Become KeyboardInterrupt; `mlflow run` answers Ctrl-C with a SIGTERM of its own, which must not hurt the end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise KeyboardInterrupt
