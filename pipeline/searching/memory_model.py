"""The probability that a configuration fits: its predicted peak, corrected by the peaks measured so far."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import ndtri

from pipeline.searching.candidates import Candidate
from pipeline.searching.gaussian import Gaussian, Vector, correlation_of

DEVIATION = {"cpu": 0.002, "cuda": 0.02}
"""Prior standard deviation of a prediction's error, as a fraction: on a CPU far beyond the worst of 93 measured
(benchmarks/prediction_cpu_2026-11-22.md); on CUDA the goal that is set for the median."""
SHARED_VARIANCE, GROUP_VARIANCE = 0.8, 0.2
"""Shares of the prior variance that all configurations have in common, and that those of one group have."""
LEVELS = (0.999, 0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
"""Probabilities that are distinguished."""
NOISE = 0.0005
"""Standard deviation of a peak that is measured again, as a fraction."""


def posterior(
    candidates: Sequence[Candidate],
    peak_bytes: Mapping[int, float],
    budget_bytes: int,
    kind: str,
    lower_bounds_bytes: Mapping[int, float] | None = None,
) -> Gaussian:
    """Return the posterior of log(measured / predicted peak) of every candidate, after measuring some, by index.

    `lower_bounds_bytes` has the censored ones: what ran out of memory within the budget has a peak above its bound. If
    it was predicted to fit, its prediction was too low, even if the predicted peak is above the bound: the
    allocator gives back cached memory near a cap. For the same reason the peak of a run that fits only so says nothing
    about the predicted one, which is without a cap.
    """
    correlation = correlation_of([candidate.group for candidate in candidates], 0.5)
    covariance = DEVIATION[kind] ** 2 * (SHARED_VARIANCE + GROUP_VARIANCE * correlation)
    prior, noise = Gaussian(np.zeros(len(candidates)), covariance), NOISE + DEVIATION[kind] / 4
    bounds = {
        number: max(ratio, 0.0) if candidates[number].fits(budget_bytes) else ratio
        for number, ratio in _log_ratios(candidates, lower_bounds_bytes or {}).items()
    }
    uncapped = {
        number: peak
        for number, peak in peak_bytes.items()
        if kind == "cpu" or (candidates[number].predicted_bytes or 0) <= budget_bytes
    }
    return prior.condition(_log_ratios(candidates, uncapped), noise).condition_above(bounds, noise)


def _log_ratios(candidates: Sequence[Candidate], peak_bytes: Mapping[int, float]) -> dict[int, float]:
    """Return log(peak / predicted peak) of those that have a prediction."""
    return {
        number: math.log(peak / predicted)
        for number, peak in peak_bytes.items()
        if (predicted := candidates[number].predicted_bytes)
    }


def probability_of_fit(
    candidates: Sequence[Candidate],
    peak_bytes: Mapping[int, float],
    budget_bytes: int,
    kind: str,
    lower_bounds_bytes: Mapping[int, float] | None = None,
) -> Vector:
    """Return for each candidate the greatest of LEVELS with which it fits the budget; 0 below all of them.

    The budget is divided by the prediction's possible error and then replayed in the predicted allocator, so that
    cached memory that the allocator gives back near a cap counts as well. A candidate without prediction gets 0.5.
    """
    error = posterior(candidates, peak_bytes, budget_bytes, kind, lower_bounds_bytes)
    return np.array(
        [
            0.5 if candidate.predicted_bytes is None else _probability(candidate, mean, deviation, budget_bytes)
            for candidate, mean, deviation in zip(candidates, error.mean_N, error.deviation_N, strict=True)
        ]
    )


def _probability(candidate: Candidate, mean: float, deviation: float, budget_bytes: int) -> float:
    safe_bytes = (int(budget_bytes * math.exp(-mean - float(ndtri(level)) * deviation)) for level in LEVELS)
    return next((level for level, safe in zip(LEVELS, safe_bytes, strict=True) if candidate.fits(safe)), 0.0)
