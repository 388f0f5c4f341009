"""The probability that a configuration fits: its predicted peak, corrected by the peaks measured so far.

Of one that is not predicted, the peak follows from the measured ones alone.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import ndtr, ndtri

from pipeline.planning.expectation import indicators
from pipeline.searching.candidates import Candidate
from pipeline.searching.gaussian import Gaussian, Vector

DEVIATION = {"cpu": 0.002, "cuda": 0.02}
"""Prior standard deviation of a prediction's error, as a fraction: on a CPU far beyond the worst of 93 measured
(benchmarks/prediction_cpu_2026-11-22.md); on CUDA the goal that is set for the median."""
SHARED_VARIANCE, VALUE_VARIANCE = 0.8, 0.2
"""Shares of the prior variance that all configurations have in common, and that those with the same values have."""
LEVELS = (0.999, 0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
"""Probabilities that are distinguished."""
EXPECTED = 0.1
"""Prior standard deviation of the logarithm of a peak that others let expect."""
NOISE = 0.0005
"""Standard deviation of a peak that is measured again, as a fraction."""
UNPREDICTED, OF_VALUE, OF_ITSELF = 2.0, 0.5, 0.1
"""Prior standard deviations of the logarithm of peaks that are not predicted: what all of them share, what those with
the same value of a dimension do, and what each has of its own."""
GROWTH = (0.5, 0.25)
"""Prior mean and standard deviation of the power of the micro-batch size with which such a peak grows: 0 where all of
it is weights, 1 where it is activations."""


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
    prior, noise = _prior(candidates, DEVIATION[kind]), NOISE + DEVIATION[kind] / 4
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


def _prior(candidates: Sequence[Candidate], deviation: float) -> Gaussian:
    """Return the prior: an error that all configurations share, and one of each value but the micro-batch size."""
    of_value_NV, columns = indicators([one.choice for one in candidates])
    zeros_N, ones_N1 = np.zeros(len(candidates)), np.ones((len(candidates), 1))
    share = VALUE_VARIANCE / max(1, len({name for name, _ in columns}))
    variance_R = deviation**2 * np.array([SHARED_VARIANCE, *(share for _ in columns)])
    return Gaussian.prior(zeros_N, np.hstack([ones_N1, of_value_NV]), variance_R, zeros_N)


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

    The budget is divided by the prediction's possible error; what it must be is the smallest on which the predicted run
    ended. Before anything is measured, a candidate that is not predicted has 0.5 at the smallest micro-batch size.
    """
    error = posterior(candidates, peak_bytes, budget_bytes, kind, lower_bounds_bytes)
    corrections_NL = np.exp(-error.mean_N[:, None] - error.deviation_N[:, None] * ndtri(LEVELS))
    smallest_bytes_N = np.array([one.smallest_bytes for one in candidates])
    fits_NL = smallest_bytes_N[:, None] <= budget_bytes * corrections_NL
    probability_N = np.where(fits_NL.any(axis=1), np.array(LEVELS)[fits_NL.argmax(axis=1)], 0.0)
    unpredicted = [number for number, candidate in enumerate(candidates) if candidate.predicted_bytes is None]
    expected = [number for number, one in enumerate(candidates) if one.is_expected and one.predicted_bytes is not None]
    if expected:
        probability_N[expected] = _of_expected(candidates, error, budget_bytes)[expected]
    if unpredicted:
        of_all_N = _from_measured_peaks(candidates, peak_bytes, budget_bytes, lower_bounds_bytes or {})
        probability_N[unpredicted] = of_all_N[unpredicted]
    return probability_N


def _of_expected(candidates: Sequence[Candidate], error: Gaussian, budget_bytes: int) -> Vector:
    """Return the probability with which each would fit if its peak were one that others let expect."""
    excess_N = np.log([(one.predicted_bytes or budget_bytes) / budget_bytes for one in candidates]) + error.mean_N
    return _or_zero(ndtr(-excess_N / np.hypot(error.deviation_N, EXPECTED)))


def _or_zero(probability_N: Vector) -> Vector:
    """Return the probabilities; those below the lowest of LEVELS as 0."""
    return np.where(probability_N < LEVELS[-1], 0.0, probability_N)


def _from_measured_peaks(
    candidates: Sequence[Candidate],
    peak_bytes: Mapping[int, float],
    budget_bytes: int,
    lower_bounds_bytes: Mapping[int, float],
) -> Vector:
    """Return the probability with which each fits by the peaks that were measured, whether or not it is predicted."""
    sizes_N = np.log([candidate.micro_batch_size for candidate in candidates])
    growth_N1 = (sizes_N - sizes_N.min())[:, None]
    of_value_NV, columns = indicators([one.choice for one in candidates])
    prior = Gaussian.prior(
        GROWTH[0] * growth_N1[:, 0],
        np.hstack([np.ones_like(growth_N1), growth_N1, of_value_NV]),
        np.array([UNPREDICTED**2, GROWTH[1] ** 2, *(OF_VALUE**2 for _ in columns)]),
        np.full(len(candidates), OF_ITSELF**2),
    )
    over_budget = prior.condition({n: math.log(peak / budget_bytes) for n, peak in peak_bytes.items()}, NOISE)
    bounds = {number: math.log(peak / budget_bytes) for number, peak in lower_bounds_bytes.items()}
    posterior = over_budget.condition_above(bounds, NOISE)
    return _or_zero(ndtr(-posterior.mean_N / np.hypot(posterior.deviation_N, NOISE)))
