"""The random effects of the time model's residual: what the work of a configuration does not explain of its time.

One effect is shared by all configurations and one is that of each value of each dimension, both smooth in the logarithm
of the micro-batch size; a constant one is that of each value, and an independent one that of each configuration. What
the trace cannot show of a value is a constant effect with a wide prior.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.planning.expectation import indicators
from pipeline.searching.candidates import Candidate
from pipeline.searching.gaussian import Matrix, Vector

LENGTH_SCALE = 1.0
"""Doublings of the micro-batch size over which a smooth effect changes."""
SHARED, SMOOTH, CONSTANT, OWN = 0.6, 0.15, 0.15, 0.15
"""Variances of the effects in units of the residual's: the shared one, those of a value of a dimension, the own one."""
UNTRACED = 0.5
"""Prior standard deviation of the logarithm of what the trace does not show of a value."""
EXPECTED = 0.1
"""The same of what the work of others that are predicted does not tell of one that is not predicted yet."""
SMALLEST_EIGENVALUE = 1e-2
"""Of the kernel of the micro-batch sizes, below which a feature is left out."""


@dataclass(frozen=True)
class Effects:
    """The random effects of the residual: features with random weights, and an independent part."""

    features_NR: Matrix
    shares_R: Vector
    """Variances of the weights in units of the residual's variance."""
    untraced_R: Vector
    """Variances of the weights that do not depend on the residual's."""
    unpredicted_N: Vector
    """Variances of the independent parts that do not depend on the residual's."""

    def at(self, numbers: list[int]) -> "Effects":
        """Return the effects on some of the candidates."""
        return replace(self, features_NR=self.features_NR[numbers], unpredicted_N=self.unpredicted_N[numbers])

    def variances(self, residual: float) -> Vector:
        """Return the variances of the weights where the residual has this standard deviation."""
        return self.shares_R * residual**2 + self.untraced_R

    def own(self, residual: float) -> Vector:
        """Return the variances of the independent parts likewise."""
        return OWN * residual**2 + self.unpredicted_N

    def covariance(self, residual: float) -> Matrix:
        """Return the covariance of the effects on a few candidates likewise."""
        return (self.features_NR * self.variances(residual)) @ self.features_NR.T + np.diag(self.own(residual))

    def untraced_part(self, values_K: Vector, residual: float, noise: float) -> Vector:
        """Return what of values on a few candidates the effects of untraced values explain: their expectation."""
        whole_KK = self.covariance(residual) + noise**2 * np.eye(len(values_K))
        of_untraced_KK = (self.features_NR * self.untraced_R) @ self.features_NR.T
        expected_K: Vector = of_untraced_KK @ np.linalg.solve(whole_KK, values_K)
        return expected_K


def effects_of(candidates: Sequence[Candidate]) -> Effects:
    """Return the effects that all candidates share, and those of each value of each dimension but the micro-batch."""
    smooth_NS = _smooth([candidate.micro_batch_size for candidate in candidates])
    of_value_NV, columns = indicators([candidate.choice for candidate in candidates])
    smooth_of_value = (of_value_NV[:, :, None] * smooth_NS[:, None, :]).reshape(len(candidates), -1)
    untraced = {(name, one.choice[name]) for one in candidates for name in one.untraced}
    num_smooth, num_values = smooth_NS.shape[1], len(columns)
    shares = np.repeat([SHARED, CONSTANT, SMOOTH], [num_smooth, num_values, num_values * num_smooth])
    variances = np.zeros(len(shares))
    variances[num_smooth : num_smooth + num_values] = [UNTRACED**2 * (column in untraced) for column in columns]
    return Effects(
        np.hstack([smooth_NS, of_value_NV, smooth_of_value]),
        shares,
        variances,
        np.array([_unpredicted(one) ** 2 for one in candidates]),
    )


def _unpredicted(candidate: Candidate) -> float:
    """Return the standard deviation of the independent part of one without a prediction of its own; else 0."""
    if candidate.predicted_bytes is None:
        return UNTRACED
    return 0.0 if candidate.is_work_known else EXPECTED


def _smooth(sizes: Sequence[int]) -> Matrix:
    """Return features of each micro-batch size, with the products of a squared exponential kernel of the logarithms."""
    distinct, numbers = np.unique(np.log2(sizes) / LENGTH_SCALE, return_inverse=True)
    values, vectors = np.linalg.eigh(np.exp(-0.5 * (distinct[:, None] - distinct[None, :]) ** 2))
    kept = values > SMALLEST_EIGENVALUE
    features: Matrix = (vectors[:, kept] * np.sqrt(values[kept]))[numbers]
    return features
