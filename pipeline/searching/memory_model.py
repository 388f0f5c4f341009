"""The probability that a configuration fits: its predicted peak, corrected by the peaks measured so far.

Of one that is not predicted, the peak follows from the measured ones alone.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import ndtr

from pipeline.planning.expectation import indicators
from pipeline.searching.candidates import Candidate
from pipeline.searching.gaussian import Gaussian, Vector

DEVIATION = {"cpu": 0.002, "cuda": 0.02}
"""Prior standard deviation of a prediction's error, as a fraction: on a CPU far beyond the worst of 93 measured
(benchmarks/prediction_cpu_2026-11-22.md); on CUDA the goal that is set for the median."""
SHARED_VARIANCE, VALUE_VARIANCE = 0.8, 0.2
"""Shares of the prior variance that all configurations have in common, and that those with the same values have."""
NEGLIGIBLE_PROBABILITY = 0.05
"""What is less likely to fit than this is taken not to fit."""
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
    """Return the probability with which each candidate fits the budget; 0 where it is negligible.

    What has to be within the budget, with the prediction's possible error, is the smallest budget on which the
    predicted run ended. Before anything is measured, a candidate that is not predicted has 0.5 at the smallest
    micro-batch size.
    """
    error = posterior(candidates, peak_bytes, budget_bytes, kind, lower_bounds_bytes)
    excess_N = np.log([(one.smallest_bytes or budget_bytes) / budget_bytes for one in candidates]) + error.mean_N
    deviation_N = np.hypot(error.deviation_N, [EXPECTED * one.is_expected for one in candidates])
    unpredicted = [number for number, candidate in enumerate(candidates) if candidate.predicted_bytes is None]
    if unpredicted:
        by_peaks = _of_measured_peaks(candidates, peak_bytes, budget_bytes, lower_bounds_bytes or {})
        excess_N[unpredicted] = by_peaks.mean_N[unpredicted]
        deviation_N[unpredicted] = by_peaks.deviation_N[unpredicted]
    probability_N = ndtr(-excess_N / np.maximum(deviation_N, NOISE))
    return np.where(probability_N < NEGLIGIBLE_PROBABILITY, 0.0, probability_N)


def _of_measured_peaks(
    candidates: Sequence[Candidate],
    peak_bytes: Mapping[int, float],
    budget_bytes: int,
    lower_bounds_bytes: Mapping[int, float],
) -> Gaussian:
    """Return the posterior of log(peak / budget) by the peaks that were measured, whether or not it is predicted."""
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
    return over_budget.condition_above(bounds, NOISE)
