"""`headroom ENTRY --setting value ...`, which is `python -m pipeline ENTRY ...` as well."""

import gc
import sys

from pipeline.config.entry_points import entry_points
from pipeline.runtime.fork_server import start_server, stop_server
from pipeline.runtime.signals import stop_at_once, stop_no_more

OBJECTS_PER_COLLECTION = 100_000
"""How many objects may be made before the garbage collector runs."""


def run() -> int:
    """Run the command line and return its exit code."""
    gc.set_threshold(OBJECTS_PER_COLLECTION)  # imported modules stay: collecting them again and again takes a second
    stop_at_once()
    if sys.argv[1:2] and sys.argv[1] in entry_points() and not {"-h", "--help"} & set(sys.argv):
        start_server()  # it imports torch and transformers while this process does the same
    from pipeline.cli import main

    try:
        return main()
    finally:
        stop_no_more()
        stop_server()
        gc.freeze()  # the collection at exit skips what was imported


if __name__ == "__main__":
    raise SystemExit(run())
