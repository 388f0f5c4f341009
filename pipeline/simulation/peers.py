"""Ranks that run beside the one that is simulated, because it waits for the objects that they send."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from pipeline.base.files import write_atomically
from pipeline.base.processes import kill_family
from pipeline.simulation.hook.objects import ASKED, ENDED

SECONDS_TO_END = 10.0
"""How long killed processes may take to end."""


class Peers:
    """The ranks that were asked for objects; `start` starts one, whose objects go into `folder`."""

    def __init__(self, folder: Path, start: "Callable[[int], subprocess.Popen[bytes]]") -> None:
        self._folder = folder
        self._start = start
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def look(self) -> None:
        """Start the ranks that have been asked for, and tell those that wait which have ended."""
        for file in self._folder.glob(f"{ASKED}*"):
            rank = int(file.name.removeprefix(ASKED))
            if rank not in self._running:
                self._running[rank] = self._start(rank)
            elif (exit_code := self._running[rank].poll()) is not None and not (ended := self._ended(rank)).exists():
                write_atomically(ended, str(exit_code).encode())

    def _ended(self, rank: int) -> Path:
        return self._folder / f"{ENDED}{rank}"

    def end(self) -> None:
        """End them; what they have sent is kept."""
        for process in self._running.values():
            kill_family(process.pid, SECONDS_TO_END)
            process.wait()
        for name in (ASKED, ENDED):
            for file in self._folder.glob(f"{name}*"):
                file.unlink()
