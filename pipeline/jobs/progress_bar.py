"""Shows how far long work is: bars of a terminal, and lines on the whole of it where the output is no terminal.

A notebook without ipywidgets has lines too: rich would warn at each bar there.
"""

import threading
import time
from dataclasses import dataclass, field
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeline.base.progress import Listener
from pipeline.jobs.printing import say

SECONDS_WITHOUT = 1.0
"""Work that is over by then shows nothing."""
SECONDS_BETWEEN_LINES = (10.0, 20.0, 30.0, 60.0)
"""Between the lines of a piece of work where there is no terminal; the last one stays."""
REFRESHES_PER_SECOND = 4
"""Of the bar: each refresh takes time from a training that uses every core."""


@dataclass
class _Piece:
    """A piece of work that is not over."""

    text: str
    total: int
    done: int = 0
    detail: str = ""
    start: float = field(default_factory=time.monotonic)
    task: TaskID | None = None
    num_lines: int = 0
    due: float = SECONDS_WITHOUT
    """Seconds after its start when it is shown, or its next line is printed."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def described(self) -> str:
        return f"{self.text}{f', {self.detail}' if self.detail else ''}"

    def line(self) -> str:
        """Return the next line: what is done, then how far it is."""
        if not self.num_lines:
            return f"{self.text} ..."
        if not self.total or not self.done:
            return f"{self.described}: {self.seconds:.0f} s so far"
        left = self.seconds * max(0, self.total - self.done) / self.done
        return f"{self.described}: {min(1, self.done / self.total):.0%} done, about {left:.0f} s left"


class ProgressBar(Listener):
    """Shows work that takes longer than a second, from a thread of its own: nothing has to advance for it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._has_bars = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
        self._pieces: list[_Piece] = []
        self._bar: Progress | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def started(self, text: str, total: int) -> None:
        """Begin a piece of work."""
        with self._lock:
            self._pieces.append(_Piece(text, total))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()

    def advanced(self, amount: int, detail: str = "") -> None:
        """Count what is done."""
        with self._lock:
            piece = self._pieces[-1]
            piece.done, piece.detail = piece.done + amount, detail

    def ended(self) -> None:
        """Remove the bar."""
        with self._lock:
            piece = self._pieces.pop()
            if self._bar is None:
                return
            if piece.task is not None:
                self._bar.remove_task(piece.task)
            if not self._bar.tasks:
                self._bar.stop()
                self._bar = None

    def _watch(self) -> None:
        while True:
            with self._lock:
                if not self._pieces:
                    self._thread = None
                    return
                for piece in self._pieces if self._has_bars else self._pieces[:1]:
                    self._show(piece)
            time.sleep(1 / REFRESHES_PER_SECOND)

    def _show(self, piece: _Piece) -> None:
        if piece.seconds < piece.due:
            return
        if not self._has_bars:
            say(self._console, piece.line(), "dim")
            piece.due = piece.seconds + SECONDS_BETWEEN_LINES[min(piece.num_lines, len(SECONDS_BETWEEN_LINES) - 1)]
            piece.num_lines += 1
            return
        if self._bar is None:
            texts = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[share]}"))
            columns = (next(texts), BarColumn(20), next(texts))
            times = (TimeElapsedColumn(), TimeRemainingColumn(elapsed_when_finished=True))
            self._bar = Progress(
                *columns, *times, console=self._console, transient=True, refresh_per_second=REFRESHES_PER_SECOND
            )
            self._bar.start()
        share = f"{min(1, piece.done / piece.total):.0%}" if piece.total else ""
        if piece.task is None:
            piece.task = self._bar.add_task(piece.described, total=piece.total or None, share=share)
        self._bar.update(piece.task, description=piece.described, completed=piece.done, share=share)
