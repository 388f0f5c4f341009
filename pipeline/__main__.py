"""`python -m pipeline ENTRY --setting value ...`."""

import atexit
import gc
import os
import signal
import sys

from pipeline.entries import INTERRUPTED, entry_points
from pipeline.processes import start_server, stop_server

OBJECTS_BEFORE_A_LOOK = 100_000
"""How many objects may be made before the garbage collector looks for cycles among them."""
STOPS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what `mlflow run` answers it with."""


def run() -> int:
    """Run the command line; return its exit code."""
    gc.set_threshold(OBJECTS_BEFORE_A_LOOK)  # what is loaded stays: looking through it again and again takes a second
    for kind in STOPS:
        signal.signal(kind, _leave)
    if sys.argv[1:2] and sys.argv[1] in entry_points() and not {"-h", "--help"} & set(sys.argv):
        start_server()  # it loads torch and transformers beside this process, which loads them now
    from pipeline.cli import main

    try:
        return main()
    finally:
        for kind in STOPS:
            signal.signal(kind, signal.SIG_IGN)
        stop_server()
        gc.freeze()  # nor does the process's end look through what was loaded


def _leave(*_: object) -> None:
    """End at once, while nothing is begun: an exception would come out of an import in whatever shape that gives it."""
    print("interrupted: nothing was begun", file=sys.stderr)  # noqa: T201
    stop_server()
    atexit._run_exitfuncs()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    raise SystemExit(run())
