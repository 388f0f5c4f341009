"""The exit code of a benchmark that can be interrupted."""

import sys
from collections.abc import Callable

from pipeline.base.errors import InvalidInputError
from pipeline.runtime.signals import INTERRUPTED


def exit_code_of(run: Callable[[], object]) -> int:
    """Run a benchmark; return 0, 2 after invalid input or 130 after Ctrl-C, and print the reason."""
    try:
        run()
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept, and the same command goes on", file=sys.stderr)
        return INTERRUPTED
    return 0
