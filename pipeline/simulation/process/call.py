"""Calls a function of Python in this process: `python call.py FILE`; `simulation/call.py` has written the file."""

from __future__ import annotations

import pickle
import sys
from multiprocessing import process, spawn
from pathlib import Path


def main(file: Path) -> None:
    """Make this process as multiprocessing would, but for the environment's own packages, and call the function."""
    preparation, call = pickle.loads(file.read_bytes())  # noqa: S301  # the parent's own file
    preparation["sys_path"] += sys.path[1:]  # without the folder of this file
    starting = process.current_process()
    starting._inheriting = True  # type: ignore[attr-defined]  # so a script without `if __name__ == "__main__"` is told
    spawn.prepare(preparation)
    function, arguments = pickle.loads(call)  # noqa: S301
    del starting._inheriting  # type: ignore[attr-defined]
    function(*arguments)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
