"""The time of a configuration by all of its runs: which of them count, and how well it is known."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.base.results import StepRecord

NOISES = (0.003, 0.01, 0.03, 0.06, 0.12)
"""Prior standard deviations of a measured time from process to process, as fractions; equally probable at first.

A quiet GPU has the smallest; on a shared machine two runs of one configuration differ by 10 to 20 % in the median.
"""
SLOWED = 2 * math.sqrt(2) * max(NOISES)
"""Log seconds above the fastest run of its configuration from which on other load has slowed a run, and not noise.

Two standard deviations of the difference of two runs with the most noise that is expected: 0.34, or 40 %.
"""

MANY = 100
"""Steps from which on the number of those below the median is normal to three digits."""
MANY_DEVIATIONS = 3.0
"""Standard deviations of that number to either side of the median, between which two steps are taken."""


@dataclass(frozen=True)
class Timing:
    """A measured time."""

    log_seconds: float
    """Logarithm of the seconds per token, padding counted."""
    error: float
    """Its standard error as a fraction."""


def counting(log_seconds: Sequence[float]) -> list[float]:
    """Return the runs of one configuration that count: those that were not slowed. Nothing makes a run faster."""
    fastest = min(log_seconds)
    return [one for one in log_seconds if one <= fastest + SLOWED]


def is_slowed(speed: float, speeds: Sequence[float]) -> bool:
    """Return whether a run of this speed is one that does not count among all runs of its configuration."""
    log_seconds = -math.log(speed)
    return log_seconds not in counting([log_seconds, *(-math.log(one) for one in speeds)])


def mean_speed(speeds: Sequence[float]) -> float:
    """Return the speed of a configuration: the geometric mean of its runs that count; 0 without any."""
    return 0.0 if not speeds else math.exp(-statistics.fmean(counting([-math.log(speed) for speed in speeds])))


def timing_of(steps: Sequence[StepRecord], warmup_steps: int) -> Timing | None:
    """Return the median time of a run's optimizer steps after the first `warmup_steps`; None if none was timed."""
    timed = sorted(math.log(record.seconds / record.positions) for record in steps[warmup_steps:])
    return Timing(statistics.median(timed), _error_of_median(timed)) if timed else None


def noise_of(runs: Sequence[Sequence[Timing]]) -> float:
    """Return the standard deviation of times from process to process, as a fraction, by the runs of each configuration.

    It is the root mean square of NOISES, each weighted by its marginal likelihood; without repeated runs, 6 %.
    """
    repeated = [group for group in map(counting_timings, runs) if len(group) > 1]
    scores = [sum(log_likelihood_of_spread(group, noise) for group in repeated) for noise in NOISES]
    weights = [math.exp(score - max(scores)) for score in scores]
    pairs = zip(weights, NOISES, strict=True)
    return math.sqrt(sum(weight * noise**2 for weight, noise in pairs) / sum(weights))


def combined(runs: Sequence[Timing], noise: float) -> Timing:
    """Return the time of a configuration: the mean of its runs that count, weighted by how well each is known.

    Its error is at least what these runs differ by: other load may have slowed one of them a little.
    """
    mean, weights = _weighted_mean(counted := counting_timings(runs), noise)
    values = [one.log_seconds for one in counted]
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Timing(mean, max(spread, 1 / math.sqrt(sum(weights))))


def log_likelihood_of_spread(runs: Sequence[Timing], noise: float) -> float:
    """Return the log marginal likelihood of a noise, given how the runs of one configuration differ.

    Its time may be anything, so a single run says nothing.
    """
    mean, weights = _weighted_mean(runs, noise)
    misfit = sum(weight * (one.log_seconds - mean) ** 2 for one, weight in zip(runs, weights, strict=True))
    return -0.5 * (misfit - sum(map(math.log, weights)) + math.log(sum(weights)))


def counting_timings(runs: Sequence[Timing]) -> list[Timing]:
    """Return the runs of a configuration that count."""
    kept = counting([one.log_seconds for one in runs]) if runs else []
    return [one for one in runs if one.log_seconds in kept]


def _weighted_mean(runs: Sequence[Timing], noise: float) -> tuple[float, list[float]]:
    """Return the mean of some runs, and the weight of each: how well it is known."""
    weights = [1 / (noise**2 + one.error**2) for one in runs]
    return statistics.fmean([one.log_seconds for one in runs], weights), weights


def _error_of_median(ordered: Sequence[float]) -> float:
    """Return the standard error of the median: from two order statistics, about the quartiles.

    For any distribution they enclose the median with the probability `inside` (David and Nagaraja, Order Statistics,
    2003, section 7.1), so one disturbed step of six or more does not matter. A single step may have the largest noise.
    """
    num = len(ordered)
    if num < 2:
        return max(NOISES)
    if num > MANY:  # the number of steps below the median is about normal
        rank = round((num - MANY_DEVIATIONS * math.sqrt(num)) / 2)
        return (ordered[num - rank] - ordered[rank - 1]) / 2 / MANY_DEVIATIONS
    rank = (num + 2) // 4
    inside = 1 - 2 * sum(math.comb(num, below) for below in range(rank)) / 2**num
    width = ordered[num - rank] - ordered[rank - 1]
    return width / 2 / statistics.NormalDist().inv_cdf((1 + inside) / 2)
