"""How long a trial is: until its own figure is known well enough, or it is plain that it cannot win."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.training.metrics import median_interval

HOPELESS_STEPS = 3
"""Timed optimizer steps that must all be slower than the incumbent before a trial is given up."""


@dataclass(frozen=True)
class TrialLength:
    """Says whether the optimizer steps so far suffice."""

    warmup_steps: int
    """First optimizer steps that no figure uses."""
    precision_percent: float
    """How near the median must be known: half the width of its 95 % interval."""
    seconds_to_beat: float | None
    """The incumbent's seconds per optimizer step, where there is one."""

    def __call__(self, seconds: Sequence[float]) -> bool:
        """Return whether the seconds of the optimizer steps so far are enough."""
        timed = seconds[self.warmup_steps :]
        margin, interval = self.precision_percent / 100, median_interval(timed)
        is_known = interval is not None and interval[1] - interval[0] <= 2 * margin * statistics.median(timed)
        return is_known or self._is_hopeless(timed, interval)

    def _is_hopeless(self, timed: Sequence[float], interval: tuple[float, float] | None) -> bool:
        """Return whether the median is slower than what there is to beat: by its interval, or plainly before that."""
        if self.seconds_to_beat is None or len(timed) < HOPELESS_STEPS:
            return False
        plainly = min(timed) > self.seconds_to_beat * (1 + self.precision_percent / 100)
        return plainly or (interval is not None and interval[0] > self.seconds_to_beat)
