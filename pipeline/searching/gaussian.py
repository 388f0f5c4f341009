"""What is believed of a figure of every configuration: a Gaussian over all of them, narrowed by measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

Vector = NDArray[np.float64]
"""One number a configuration."""
Matrix = NDArray[np.float64]
"""One number a pair of configurations."""

LEARNING_RATE = 0.3
"""Power of the evidence by which beliefs are weighed; below 1, since none of them is quite true (Gruenwald and van
Ommen, Inconsistency of Bayesian Inference for Misspecified Linear Models, 2017)."""


@dataclass(frozen=True)
class Belief:
    """A joint Gaussian distribution of the logarithms of a figure."""

    mean_N: Vector
    covariance_NN: Matrix

    @property
    def deviation_N(self) -> Vector:
        """Return the standard deviation of each."""
        variance: Vector = np.sqrt(np.maximum(np.diag(self.covariance_NN), 0.0))
        return variance

    def given(self, values: Mapping[int, float], noise: float) -> "Belief":
        """Return the belief after measuring `values` (by number), each with a standard deviation of `noise`.

        Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.23 and 2.24.
        """
        if not values:
            return self
        known, off, factor = self._surprise(values, noise)
        across_NK = self.covariance_NN[:, known]
        mean = self.mean_N + across_NK @ cho_solve(factor, off)
        return Belief(mean, self.covariance_NN - across_NK @ cho_solve(factor, across_NK.T))

    def log_evidence(self, values: Mapping[int, float], noise: float) -> float:
        """Return the logarithm of how probable it is to measure `values`, up to a constant (ibid., equation 2.30)."""
        _, off, factor = self._surprise(values, noise)
        return float(-0.5 * off @ cho_solve(factor, off) - np.log(np.diag(factor[0])).sum())

    def left_out(self, values: Mapping[int, float], noise: float) -> tuple[Vector, Vector]:
        """Return how far each of `values` is from what the others let expect, and the variance that it may have.

        Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equation 5.12.
        """
        known, off, factor = self._surprise(values, noise)
        precision_KK = cho_solve(factor, np.eye(len(known)))
        variance_K = 1 / np.diag(precision_KK)
        return variance_K * (precision_KK @ off), variance_K

    def _surprise(self, values: Mapping[int, float], noise: float) -> tuple[NDArray[np.int_], Vector, Any]:
        """Return which are measured, how far off the mean, and the factor of what covariance they should have."""
        known = np.fromiter(values, int)
        off = np.fromiter(values.values(), float) - self.mean_N[known]
        return known, off, cho_factor(self.covariance_NN[np.ix_(known, known)] + noise**2 * np.eye(len(known)))

    def of(self, numbers: list[int]) -> "Belief":
        """Return what is believed of some."""
        return Belief(self.mean_N[numbers], self.covariance_NN[np.ix_(numbers, numbers)])

    def draws(self, num_draws: int) -> Matrix:
        """Return `num_draws` possible worlds, one a row; always the same."""
        values, vectors = np.linalg.eigh(self.covariance_NN)
        root_NN = vectors * np.sqrt(np.maximum(values, 0.0))
        noise_DN = np.random.default_rng(0).standard_normal((num_draws, len(self.mean_N)))
        worlds: Matrix = self.mean_N + noise_DN @ root_NN.T
        return worlds


@dataclass(frozen=True)
class Mixture:
    """Several beliefs, each probable to a degree, and the noise of a measurement that each has."""

    beliefs: Sequence[Belief]
    noises: Sequence[float]
    shares: Vector
    """How probable each is."""

    @classmethod
    def of(cls, priors: Sequence[tuple[Belief, float]], values: Mapping[int, float]) -> Self:
        """Return what is believed after measuring `values`, each prior weighed by how probable it made them."""
        logarithms = [prior.log_evidence(values, noise) if values else 0.0 for prior, noise in priors]
        beliefs = [prior.given(values, noise) for prior, noise in priors]
        return cls(beliefs, [noise for _, noise in priors], _shares(np.array(logarithms)))

    @property
    def mean_N(self) -> Vector:
        """Return the expected value of each."""
        mean: Vector = self.shares @ np.stack([belief.mean_N for belief in self.beliefs])
        return mean

    def given(self, values: Mapping[int, float]) -> "Mixture":
        """Return the mixture after measuring `values` that say nothing new of the beliefs' shares."""
        pairs = zip(self.beliefs, self.noises, strict=True)
        return Mixture([belief.given(values, noise) for belief, noise in pairs], self.noises, self.shares)

    def draws(self, numbers: list[int], num_draws: int) -> Matrix:
        """Return about `num_draws` possible worlds of some, one a row; always the same."""
        counts = np.rint(self.shares * num_draws).astype(int)
        pairs = zip(self.beliefs, counts, strict=True)
        return np.concatenate([belief.of(numbers).draws(count) for belief, count in pairs if count])


def surprises(priors: Sequence[tuple[Belief, float]], values: Mapping[int, float]) -> dict[int, float]:
    """Return by how many standard deviations each of `values` exceeds what the others let expect."""
    if not values:
        return {}
    pairs = [prior.left_out(values, noise) for prior, noise in priors]
    off_BK, variance_BK = (np.stack(parts) for parts in zip(*pairs, strict=True))
    of_all_B1 = np.array([[prior.log_evidence(values, noise)] for prior, noise in priors])
    of_others_BK = of_all_B1 + 0.5 * (np.log(variance_BK) + off_BK**2 / variance_BK)
    shares_BK = _shares(of_others_BK)
    mean_K = (shares_BK * off_BK).sum(axis=0)
    deviation_K = np.sqrt((shares_BK * (variance_BK + off_BK**2)).sum(axis=0) - mean_K**2)
    return dict(zip(values, (mean_K / deviation_K).tolist(), strict=True))


def _shares(log_evidence_BK: Matrix) -> Matrix:
    """Return how probable each belief is, by how probable it made what was measured."""
    weights_BK = np.exp(LEARNING_RATE * (log_evidence_BK - log_evidence_BK.max(axis=0)))
    shares_BK: Matrix = weights_BK / weights_BK.sum(axis=0)
    return shares_BK


def similarity(groups: "list[tuple[object, ...]]", of_a_difference: float) -> Matrix:
    """Return how alike each pair is: `of_a_difference` for every dimension in which the two differ."""
    columns = [np.array([repr(group[axis]) for group in groups]) for axis in range(len(groups[0]))]
    differing = sum((column[:, None] != column[None, :]).astype(float) for column in columns)
    alike: Matrix = np.power(of_a_difference, differing * np.ones((len(groups), len(groups))))
    return alike
