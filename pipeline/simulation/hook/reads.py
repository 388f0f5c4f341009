"""Counts what a process reads from a simulated card that is not known, by file and line.

A process whose host touches a card's memory without asking for a copy is ended, with a word and Python's traceback.

The file PID.reads in the report's folder has a line for each place, `bytes may_steer count file:line`. It is written
whenever a place is new, and at the end.
"""

import atexit
import ctypes
import faulthandler
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120
_PRINTS = _TORCH + "_tensor_str.py"
"""The file that prints tensors: what it reads steers nothing."""
_SIMULATION = str(Path(__file__).parents[1]) + os.sep
_NOT_THE_USERS = (_TORCH, _SIMULATION, "<frozen")
"""How the names of files begin whose lines are passed over: torch's, the simulation's, Python's own."""
_places: Counter[tuple[int, int, str]] = Counter()


def _write() -> None:
    folder = os.environ.get("SIMULATED_CARD_REPORT")
    if folder and _places:
        lines = [f"{size} {may_steer} {count} {place}\n" for (size, may_steer, place), count in _places.items()]
        file = Path(folder, f"{os.getpid()}.reads")
        file.with_suffix(".writing").write_text("".join(lines))
        file.with_suffix(".writing").replace(file)  # it may be read at any time


def _note(size: int, may_steer: int) -> None:
    """Count a read at the innermost line outside torch; at `?` where no Python runs, as in autograd's threads."""
    place = "?"
    frame: FrameType | None = sys._getframe()
    while frame is not None and place == "?":
        file = frame.f_code.co_filename
        if file == _PRINTS:
            may_steer = 0
        if not file.startswith(_NOT_THE_USERS):
            place = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    read = size, may_steer, place
    _places[read] += 1
    if _places[read] == 1:
        _write()


_callback = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int)(_note)
ctypes.CDLL(None).card_watch_reads(_callback)
faulthandler.enable(file=2)  # before the card's own handler, which then comes first: its is of the faults that follow
ctypes.CDLL(None).card_watch_faults()
os.register_at_fork(after_in_child=_places.clear)
atexit.register(_write)  # which keeps all of this alive, what C calls too
