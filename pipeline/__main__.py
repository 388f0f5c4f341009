"""`python -m pipeline ENTRY --setting value ...`."""

import gc
import sys

from pipeline.base.errors import InvalidInputError
from pipeline.config.entry_points import entry_points
from pipeline.runtime.fork_server import start_server, stop_server
from pipeline.runtime.signals import exit_on_signal, ignore_signals

OBJECTS_BEFORE_A_LOOK = 100_000
"""How many objects may be made before the garbage collector looks for cycles among them."""


def run() -> int:
    """Run the command line; return its exit code."""
    gc.set_threshold(OBJECTS_BEFORE_A_LOOK)  # what is loaded stays: looking through it again and again takes a second
    exit_on_signal()
    if sys.argv[1:2] and sys.argv[1] in entry_points() and not {"-h", "--help"} & set(sys.argv):
        start_server()  # it loads torch and transformers beside this process, which loads them now
    try:
        from pipeline.cli import main

        return main()
    except InvalidInputError as error:  # of a module that HEADROOM_TECHNIQUES names
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    finally:
        ignore_signals()
        stop_server()
        gc.freeze()  # nor does the process's end look through what was loaded


if __name__ == "__main__":
    raise SystemExit(run())
