"""What benchmarks share as commands: the options of their files, a limit of time, and the exit code."""

import argparse
import datetime
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.base.errors import InvalidInputError
from pipeline.runtime.signals import INTERRUPTED

UNFINISHED = os.EX_TEMPFAIL
"""The exit code if something is left, mostly because the time was over."""


def files_parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of the date and the folder of a benchmark's files; `about` is its description."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default=f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}", help="of the files")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="where the files are written")
    return parser


class Deadline:
    """The moment after which a benchmark begins no further run."""

    def __init__(self, minutes: float | None) -> None:
        """Count from now on; None: without end."""
        if minutes is not None and minutes <= 0:
            raise InvalidInputError(f"--minutes must be more than 0, and is {minutes:g}; leave it out for no limit")
        self._end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._end


def exit_code_of(run: Callable[[], object]) -> int:
    """Run a benchmark, which returns the number of runs that are left, if it can leave any; return its exit code.

    0: complete, 2: invalid input, 75: runs are left, 130: Ctrl-C. The reason is printed.
    """
    try:
        num_left = run()
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept, and the same command goes on", file=sys.stderr)
        return INTERRUPTED
    if num_left:
        print(f"not complete: the same command goes on with what is left ({num_left})", file=sys.stderr)
        return UNFINISHED
    return 0
