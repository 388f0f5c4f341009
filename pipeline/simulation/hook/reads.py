"""Counts what a process reads from a simulated card that is not known, by file and line.

The file PID.reads in the report's folder has a line for each place, `bytes count file:line`. It is written whenever a
place is new, and at the end.
"""

import atexit
import ctypes
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__)  # noqa: PTH120
_PROCESS = os.getpid()
_places: Counter[tuple[int, str]] = Counter()


def _place() -> str:
    """Return the innermost line of Python outside torch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, os.path.dirname(__file__), "<frozen")):  # noqa: PTH120
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _write() -> None:
    folder = os.environ.get("SIMULATED_CARD_REPORT")
    if folder and _places and os.getpid() == _PROCESS:
        lines = [f"{size} {count} {place}\n" for (size, place), count in _places.items()]
        Path(folder, f"{_PROCESS}.reads").write_text("".join(lines))


def _note(size: int) -> None:
    place = size, _place()
    _places[place] += 1
    if _places[place] == 1:
        _write()


_callback = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(_note)
ctypes.CDLL(None).card_watch_reads(_callback)
atexit.register(_write)  # which keeps all of this alive, what C calls too
