"""Differences in time between the variants of a job, with the intervals in which they lie."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.training.metrics import Row, with_time
from pipeline.training.timing import NOISES, combined, noise_of

CONFIDENCE = 0.95
"""Probability that the intervals of all variants of a job hold."""
ERROR = "seconds_per_step_error_percent"
"""Metric: standard error of seconds_per_step, as a percentage of it."""
MARGIN = "seconds_per_step_margin_percent"
"""Metric: half the interval of seconds_per_step among the variants of one job, as a percentage of it."""
MEASURED = frozenset({"peak_allocated_mib", "seconds_per_step"})
"""Metrics of a run that a comparison needs."""


@dataclass(frozen=True)
class TimeDifference:
    """The change of the time per sample from one run to another, in percent, and its interval."""

    percent: float
    low: float
    high: float

    @property
    def speedup(self) -> float:
        """The speed as a multiple of the other one's."""
        return 1 / (1 + self.percent / 100)

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0

    @property
    def is_faster(self) -> bool:
        """Whether less time is taken, beyond noise."""
        return self.high < 0


def with_times(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows of a job with their times by all of their runs, and with those against their baselines.

    All intervals of a job hold together with the probability CONFIDENCE: each is as wide as Bonferroni's correction for
    the number of variants asks for. A row without timings keeps its time, and the standard error that it has: MLflow
    has that of each run, whose margin was that of its own job. The metrics of the others are those of their first run.
    """
    noise = noise_of([row.timings for row in rows if row.timings])
    num_compared = max(1, sum(row.completed and not row.is_baseline for row in rows))
    quantile = statistics.NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / num_compared)
    timed = [_timed(row, noise, quantile) for row in rows]
    baselines = {row.comparison: row for row in timed if row.is_baseline}
    return tuple(_against(row, baselines.get(row.comparison)) for row in timed)


def difference(row: Row, other: Row) -> TimeDifference | None:
    """Return by how much more time per sample a row takes than another one; None if one of them has no times."""
    needed = {"samples_per_second", MARGIN}
    if not (needed <= set(row.metrics) and needed <= set(other.metrics)):
        return None
    change = math.log(other.metrics["samples_per_second"] / row.metrics["samples_per_second"])
    margin = math.hypot(*(math.log1p(one.metrics[MARGIN] / 100) for one in (row, other)))
    return TimeDifference(*(100 * math.expm1(value) for value in (change, change - margin, change + margin)))


def time_change(row: Row) -> TimeDifference | None:
    """Return the difference from the baseline that a row has among its metrics; None if it has none."""
    names = ("time_overhead_percent", "time_overhead_low_percent", "time_overhead_high_percent")
    return TimeDifference(*(row.metrics[name] for name in names)) if set(names) <= set(row.metrics) else None


def is_compared(row: Row) -> bool:
    """Return whether a row has memory and time against its baseline."""
    is_measured = row.completed and set(row.metrics) >= MEASURED | {"memory_saving_percent"}
    return is_measured and not row.is_baseline and time_change(row) is not None


def _timed(row: Row, noise: float, quantile: float) -> Row:
    """Return the row with its times by all of its runs that count."""
    if not {"seconds_per_step", "samples_per_second"} <= set(row.metrics):
        return row
    metrics, error = row.metrics, row.metrics.get(ERROR, 100 * math.hypot(noise, max(NOISES))) / 100
    if row.timings:
        time = combined(row.timings, noise)
        metrics, error = with_time(metrics, math.exp(time.log_seconds - row.timings[0].log_seconds)), time.error
    return replace(row, metrics={**metrics, ERROR: 100 * error, MARGIN: 100 * math.expm1(quantile * error)})


def _against(row: Row, baseline: Row | None) -> Row:
    if baseline is None or row is baseline or not (row.completed and baseline.completed):
        return row
    found = difference(row, baseline)
    if found is None:
        return row
    metrics = {
        "time_overhead_percent": found.percent,
        "time_overhead_low_percent": found.low,
        "time_overhead_high_percent": found.high,
        "speedup": found.speedup,
    }
    return replace(row, metrics={**row.metrics, **metrics})
