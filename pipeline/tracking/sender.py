"""Sends runs to MLflow from a background thread: training does not wait for the store, and does not fail if it does."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mlflow import MlflowClient

from pipeline.base.errors import first_line
from pipeline.tracking.unsent import UnsentRun

SLOW_SECONDS = 2.0
"""An attempt that fails after longer than this has waited for an unreachable store."""
SECONDS_BEFORE_RETRY = 30.0
"""Pause after such an attempt."""
REMEDY = "send it with: fitproof sync"


class Sender:
    """One background thread that sends the runs of a job; the first error is reported once."""

    def __init__(self, client: MlflowClient) -> None:
        self.client = client
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tracking")
        self._runs: list[UnsentRun] = []
        self._paused_until = 0.0
        self._has_reported = False

    def add(self, run: UnsentRun) -> None:
        """Send another run in the background, and once more when the sender is closed."""
        self._runs.append(run)
        self.send(run)

    def send(self, run: UnsentRun) -> None:
        """Send in the background what this run has not sent."""
        self._executor.submit(self._attempt, run)

    def do(self, call: Callable[[], object]) -> None:
        """Make this call in the background."""
        self._executor.submit(call)

    def close(self) -> None:
        """Send everything that is left, try again what failed, and report what stays on disk."""
        self._executor.submit(self._attempt_all)
        self._executor.shutdown(wait=True)
        unsent = [run for run in self._runs if not run.is_sent]
        for run in unsent:
            run.update(owner=None)
        if unsent:
            _report(f"{len(unsent)} of {len(self._runs)} runs have not reached MLflow completely; {REMEDY}")
        elif self._has_reported:
            _report("all results have reached MLflow now")

    def _attempt_all(self) -> None:
        self._paused_until = 0.0
        for run in self._runs:
            self._attempt(run)

    def _attempt(self, run: UnsentRun) -> None:
        start = time.monotonic()
        if run.is_sent or start < self._paused_until:
            return
        error = run.send(self.client)
        if error is None:
            return
        if not self._has_reported:
            _report(f"MLflow did not accept the results ({first_line(error)}); the job continues, and they are on disk")
            self._has_reported = True
        if time.monotonic() - start > SLOW_SECONDS:
            self._paused_until = time.monotonic() + SECONDS_BEFORE_RETRY


def _report(text: str) -> None:
    print(f"tracking: {text}", file=sys.stderr)  # noqa: T201  for the user
