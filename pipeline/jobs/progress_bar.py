"""The bar that shows how far the tokenization of a corpus is."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from pipeline.base.progress import Listener
from pipeline.runtime.signals import interrupt_on_signal

SECONDS_WITHOUT = 1.0
"""Work that is over by then shows nothing."""


class ProgressBar(Listener):
    """A bar of a terminal; where the output is no terminal, a line when the work begins and one when it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._text, self._total, self._done, self._start, self._task = "", 0, 0, 0.0, TaskID(0)

    def started(self, text: str, total: int) -> None:
        """Remember what begins; Ctrl-C removes what is written until it ends."""
        interrupt_on_signal()
        self._text, self._total, self._done, self._start = text, total, 0, time.monotonic()

    def advanced(self, amount: int) -> None:
        """Show how far it is, if it has taken long enough."""
        self._done += amount
        if self._bar is None and time.monotonic() - self._start > SECONDS_WITHOUT:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task(self._text, total=self._total or None)
            if self._console.is_terminal:
                self._bar.start()
            else:
                self._console.print(f"{self._text} ...", highlight=False)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def ended(self) -> None:
        """Remove the bar, and say how long it took."""
        if self._bar is not None:
            self._bar.stop()
            seconds = time.monotonic() - self._start
            self._console.print(f"{self._text}: {seconds:.0f} s", style="dim", highlight=False)
        self._bar = None
