"""`fitproof ENTRY --setting value ...`, which is `python -m fitproof ENTRY ...` as well."""

import gc
import sys
from typing import NoReturn

from pipeline.base.errors import InvalidInputError
from pipeline.cli import asks_for_help, main
from pipeline.config.entry_points import entry_points, value_of
from pipeline.prediction.card_processes import start_importing
from pipeline.runtime.fork_server import stop_server
from pipeline.runtime.signals import end_process, exit_on_signal, ignore_signals

OBJECTS_PER_COLLECTION = 100_000
"""How many objects may be made before the garbage collector runs."""


def gpu_of(words: list[str]) -> str | None:
    """Return what `--gpu` names before words are parsed, auto where it names none; None if nothing will be trained."""
    if not words or words[0] not in entry_points() or asks_for_help(words):
        return None
    return "auto" if "--" in words else value_of("gpu", words) or "auto"


def run() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    gc.set_threshold(OBJECTS_PER_COLLECTION)  # imported modules are never freed: fewer collections save a second
    exit_on_signal()
    if (gpu := gpu_of(sys.argv[1:])) is not None:
        start_importing(gpu)
    try:
        code = main()
    except InvalidInputError as error:  # of a module that FITPROOF_TECHNIQUES names
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        code = 2
    finally:
        ignore_signals()
        stop_server()
    end_process(code)


if __name__ == "__main__":
    run()
