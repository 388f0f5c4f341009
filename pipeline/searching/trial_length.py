"""When a trial stops: once its median step time is known well enough, or it cannot be the fastest."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.training.metrics import median_interval

PRECISION_PERCENT = 2.0
"""Half the 95 % interval of a median step time at which a run that is for its time ends, unless a setting says it."""
HOPELESS_STEPS = 3
"""Timed optimizer steps that must all be slower than the incumbent before a trial stops early."""


@dataclass(frozen=True)
class TrialLength:
    """A predicate that stops a trial, evaluated on the seconds per token, padding counted, of its steps so far."""

    warmup_steps: int
    """First optimizer steps, which are not timed."""
    precision_percent: float
    """Half the width of the 95 % interval of the median, at which it is known well enough."""
    seconds_to_beat: float | None
    """Seconds per token, padding counted, of the fastest trial so far; None if there is none."""

    def __call__(self, seconds: Sequence[float]) -> bool:
        """Return whether to stop."""
        timed = seconds[self.warmup_steps :]
        margin, interval = self.precision_percent / 100, median_interval(timed)
        is_known = interval is not None and interval[1] - interval[0] <= 2 * margin * statistics.median(timed)
        return is_known or self._is_hopeless(timed, interval)

    def _is_hopeless(self, timed: Sequence[float], interval: tuple[float, float] | None) -> bool:
        """Return whether the median is slower than the incumbent: by its interval, or by every step so far."""
        if self.seconds_to_beat is None or len(timed) < HOPELESS_STEPS:
            return False
        is_every_step_slower = min(timed) > self.seconds_to_beat * (1 + self.precision_percent / 100)
        return is_every_step_slower or (interval is not None and interval[0] > self.seconds_to_beat)
