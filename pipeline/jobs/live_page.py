"""The page of a job that is still running: rewritten between its runs, and reloaded by the browser that shows it."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pipeline.base.files import write_atomically

if TYPE_CHECKING:
    from pipeline.report.findings import Findings

SHARE = 0.02
"""The share of a job's time that its page may take: the next one waits until the last one is no more than that."""
FILE = "report.html"


class LivePage:
    """The file report.html in the folder of a job that is running; publish() replaces it at the end."""

    def __init__(self, folder: Path, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self.file, self._console, self._now = folder / FILE, console, now
        self._due, self._lock = now(), threading.Lock()

    def write(self, make_findings: Callable[[], "Findings"], state: str) -> None:
        """Write the page of the findings so far and how far the job is, if it is due and no other thread writes it.

        Charts and tables are imported here, between two runs: the report at the end needs them as well. An error says
        so in the terminal, and no further page is written: the measurements go on.
        """
        from pipeline.report.findings import report_of
        from pipeline.report.page import to_html
        from pipeline.report.plot import javascript

        if self._now() < self._due or not self._lock.acquire(blocking=False):
            return
        try:
            javascript()
            start = self._now()
            report = replace(report_of(make_findings()), commands=())  # what they run is written at the end
            page = to_html(report, f"{state}, written at {time.strftime('%H:%M:%S')}")
            write_atomically(self.file, page.encode())
            self._due = self._now() + (self._now() - start) / SHARE
        except Exception as error:  # of any chart or file: the report at the end meets it again, after the last run
            self._due = math.inf
            self._console.print(f"the page of the running job is not written: {error}", style="yellow", highlight=False)
        finally:
            self._lock.release()
