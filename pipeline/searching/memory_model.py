"""How probable it is that a configuration fits: its predicted peak, corrected by what the measured ones were off."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import ndtri

from pipeline.searching.candidates import Candidate
from pipeline.searching.gaussian import Belief, Vector, similarity

DEVIATION = {"cpu": 0.002, "cuda": 0.02}
"""How far predictions are thought to be off before anything is measured, as a share: on a CPU far beyond the worst of
93 measured (benchmarks/prediction_cpu_2026-11-22.md); on CUDA the goal that is set for the median."""
SHARED, OF_ONE_GROUP = 0.8, 0.2
"""Parts of the variance that all configurations have in common, and that those of one policy and precision have."""
LEVELS = (0.999, 0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
"""Probabilities that are told apart."""
NOISE = 0.0005
"""Standard deviation of a peak that is measured again, as a share."""


def believe(candidates: Sequence[Candidate], measured_bytes: Mapping[int, float], kind: str) -> Belief:
    """Return the belief about log(measured / predicted peak) after the measurements, by number of candidate.

    A measurement that is a lower bound (out of memory) belongs to them where it exceeds the prediction.
    """
    alike = similarity([candidate.group for candidate in candidates], 0.5)
    prior = Belief(np.zeros(len(candidates)), DEVIATION[kind] ** 2 * (SHARED + OF_ONE_GROUP * alike))
    residuals = {
        number: math.log(peak / predicted)
        for number, peak in measured_bytes.items()
        if (predicted := candidates[number].predicted_bytes)
    }
    return prior.given(residuals, NOISE + DEVIATION[kind] / 4)


def probability_of_fit(
    candidates: Sequence[Candidate], measured_bytes: Mapping[int, float], budget_bytes: int, kind: str
) -> Vector:
    """Return for each candidate the greatest of LEVELS with which it fits, 0 where it does with none.

    The budget is made smaller by what the prediction may be off, so that the allocator's ways of giving back cached
    memory near a cap count as well. What cannot be predicted is as likely to fit as not.
    """
    belief = believe(candidates, measured_bytes, kind)
    return np.array(
        [
            0.5 if candidate.predicted_bytes is None else _probability(candidate, off, deviation, budget_bytes)
            for candidate, off, deviation in zip(candidates, belief.mean_N, belief.deviation_N, strict=True)
        ]
    )


def _probability(candidate: Candidate, off: float, deviation: float, budget_bytes: int) -> float:
    safe_bytes = (int(budget_bytes * math.exp(-off - float(ndtri(level)) * deviation)) for level in LEVELS)
    return next((level for level, safe in zip(LEVELS, safe_bytes, strict=True) if candidate.fits(safe)), 0.0)
