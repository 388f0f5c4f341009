"""Where the wall-clock time of a search's session goes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PREDICTING, TRIALS, VERIFICATION, OVERHEAD = "predicting", "trials", "verification", "overhead"


class SearchClock:
    """Divides time by what runs: trials, else a verification, else predictions, else the session itself."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._since, self._lock = now, now(), threading.Lock()
        self._running = dict.fromkeys((TRIALS, VERIFICATION, PREDICTING), 0)
        self._seconds = dict.fromkeys((PREDICTING, TRIALS, VERIFICATION, OVERHEAD), 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each activity until now."""
        with self._lock:
            self._count()
            return dict(self._seconds)

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Count the time of the body to an activity."""
        self.begin(activity)
        try:
            yield
        finally:
            self.end(activity)

    def begin(self, activity: str) -> None:
        """Start one more run of an activity, of which several may run at once."""
        with self._lock:
            self._count()
            self._running[activity] += 1

    def end(self, activity: str) -> None:
        """End one of them."""
        with self._lock:
            self._count()
            self._running[activity] -= 1

    def _count(self) -> None:
        """Add the time since the last change to what ran in it."""
        activity = next((name for name, number in self._running.items() if number), OVERHEAD)
        now = self._now()
        self._seconds[activity] += now - self._since
        self._since = now
