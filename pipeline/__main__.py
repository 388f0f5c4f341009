"""`python -m pipeline ENTRY --setting value ...`."""

import gc

OBJECTS_BEFORE_A_LOOK = 100_000
"""How many objects may be made before the garbage collector looks for cycles among them."""


def run() -> int:
    """Run the command line; return its exit code."""
    gc.set_threshold(OBJECTS_BEFORE_A_LOOK)  # what is loaded stays: looking through it again and again takes a second
    from pipeline.cli import main

    code = main()
    gc.freeze()  # nor does the process's end look through it
    return code


if __name__ == "__main__":
    raise SystemExit(run())
