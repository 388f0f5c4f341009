"""How long a run may take: its time limit, and how long all of its ranks may stand still."""

import math
import time
from collections.abc import Sequence

STILL_SECONDS = 600.0
"""How long no rank may enter a collective operation, as long as NCCL waits by default."""
SECONDS_BETWEEN_POLLS = 0.2
"""How often a run is checked."""


class Watch:
    """Watches a run from its start on; `progress` is how many collective operations each rank has entered.

    `first_rank` is the number of the first rank that is watched.
    """

    def __init__(self, time_limit: float | None, progress: Sequence[int], first_rank: int) -> None:
        self._time_limit, self._progress, self._first_rank = time_limit, progress, first_rank
        self._start = self._moved = time.monotonic()
        self._seen = list(progress)

    def seconds_to_wait(self) -> float:
        """Return after how many seconds to check it next."""
        left = math.inf if self._time_limit is None else self._start + self._time_limit - time.monotonic()
        return max(0.0, min(left, SECONDS_BETWEEN_POLLS))

    def why_too_long(self) -> str | None:
        """Return why the run is ended: it has taken too long, or its ranks stand still; None if it goes on."""
        now, counts = time.monotonic(), list(self._progress)
        if counts != self._seen:
            self._seen, self._moved = counts, now
        if self._time_limit is not None and now >= self._start + self._time_limit:
            return f"ended after its time_limit of {self._time_limit:g} seconds{self._awaited()}"
        if any(counts) and now >= self._moved + STILL_SECONDS:
            return f"ended after {STILL_SECONDS:g} seconds without progress{self._awaited()}"
        return None

    def _awaited(self) -> str:
        """Return which ranks the others waited for: those that have entered the fewest collective operations."""
        fewest = min(self._progress, default=0)
        awaited = [str(rank) for rank, count in enumerate(self._progress, self._first_rank) if count == fewest]
        if len(awaited) == len(self._progress):
            return ""
        return f"; the other ranks waited for rank {', '.join(awaited)}"
