"""Gaussian posteriors of a quantity of every configuration, conditioned on measurements.

No matrix has a row and a column for each configuration. The quantity is a sum of features with random weights and of an
independent part, so N configurations with R features and K measurements take N x (R + K) numbers.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.special import log_ndtr, ndtr

from pipeline.training.timing import Timing, log_likelihood_of_spread

Vector = NDArray[np.float64]
"""One number for each configuration."""
Matrix = NDArray[np.float64]
"""Several numbers for each configuration."""
Indices = NDArray[np.int_]
Runs = Mapping[int, Sequence[float]]
"""What the runs of each measured configuration have measured, by its index."""
Residual = tuple[float, float]
"""The residual of a measurement when it is predicted from the others, and its standard deviation."""

LEARNING_RATE = 0.5
"""Power of the marginal likelihood in the weights; below 1, since every component is misspecified (Gruenwald and van
Ommen, Inconsistency of Bayesian Inference for Misspecified Linear Models, 2017)."""
NEGLIGIBLE_DEVIATIONS = 5.0
"""Standard deviations that a Gaussian exceeds with a probability of 3e-7."""


@dataclass(frozen=True)
class Gaussian:
    """A joint Gaussian distribution of the logarithm of a quantity of N configurations.

    Its covariance is features x variances x features' + independent variances - explained x explained'.
    """

    mean_N: Vector
    variance_N: Vector
    """The variances, which are the diagonal of the covariance."""
    features_NR: Matrix
    variance_R: Vector
    """Prior variances of the features' weights."""
    own_N: Vector
    """Prior variance of the independent part of each configuration."""
    indices_K: Indices
    """Configurations of the measurements on which it is conditioned."""
    noise_K: Vector
    """Standard deviation of each of these measurements."""
    explained_NK: Matrix
    """What the measurements take from the covariance, as a factor."""

    @classmethod
    def prior(cls, mean_N: Vector, features_NR: Matrix, variance_R: Vector, own_N: Vector) -> Self:
        """Return the distribution before anything is measured."""
        variance_N = np.square(features_NR) @ variance_R + own_N
        none = (np.zeros(0, int), np.zeros(0), np.zeros((len(mean_N), 0)))
        return cls(mean_N, variance_N, features_NR, variance_R, own_N, *none)

    @property
    def deviation_N(self) -> Vector:
        """The standard deviations."""
        deviation: Vector = np.sqrt(np.maximum(self.variance_N, 0.0))
        return deviation

    def covariance_with(self, indices: Indices) -> Matrix:
        """Return the covariance of every configuration with some of them, one a column."""
        return self._prior_with(indices) - self.explained_NK @ self.explained_NK[indices].T

    def condition(
        self, values: Mapping[int, float], noise: float | Vector, cross_NJ: Matrix | None = None
    ) -> "Gaussian":
        """Return the posterior after measuring `values`, by index, each with a standard deviation of `noise`.

        `cross_NJ` is the covariance with them, where the caller has it. Rasmussen and Williams, Gaussian Processes for
        Machine Learning, 2006, equations 2.23 and 2.24.
        """
        if not values:
            return self
        indices_J = np.fromiter(values, int)
        residual_J = np.fromiter(values.values(), float) - self.mean_N[indices_J]
        cross_NJ = self.covariance_with(indices_J) if cross_NJ is None else cross_NJ
        noise_J = np.broadcast_to(noise, len(indices_J))
        root_JJ = np.linalg.cholesky(cross_NJ[indices_J] + np.diag(noise_J**2))
        explained_NJ = solve_triangular(root_JJ, cross_NJ.T, lower=True).T
        return replace(
            self,
            mean_N=self.mean_N + explained_NJ @ solve_triangular(root_JJ, residual_J, lower=True),
            variance_N=self.variance_N - np.square(explained_NJ).sum(axis=1),
            indices_K=np.append(self.indices_K, indices_J),
            noise_K=np.append(self.noise_K, noise_J),
            explained_NK=np.hstack([self.explained_NK, explained_NJ]),
        )

    def condition_above(self, bounds: Mapping[int, float], noise: float) -> "Gaussian":
        """Return the distribution after learning that these values, measured with `noise`, lie above their bounds.

        The mean moves to that of the truncated Gaussian. The covariance stays: a smaller one could raise the
        probability that a value is low, which a lower bound never does.
        """
        result = self
        for index, bound in bounds.items():
            deviation = float(np.hypot(self.deviation_N[index], noise))
            scaled = (bound - result.mean_N[index]) / deviation
            hazard = np.exp(-0.5 * scaled**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(-scaled))
            column_N = self.covariance_with(np.array([index]))[:, 0]
            result = replace(result, mean_N=result.mean_N + column_N * hazard / deviation)
        return result

    def log_marginal_likelihood(self, values: Mapping[int, float], noise: float | Vector) -> float:
        """Return the log marginal likelihood of `values`, up to a constant (ibid., equation 2.30)."""
        residual_K, factor = self._residuals(values, noise)
        return float(-0.5 * residual_K @ cho_solve(factor, residual_K) - np.log(np.diag(factor[0])).sum())

    def leave_one_out(self, values: Mapping[int, float], noise: float | Vector) -> tuple[Vector, Vector]:
        """Return the residual of each of `values` when it is predicted from the others, and its variance.

        Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equation 5.12.
        """
        residual_K, factor = self._residuals(values, noise)
        precision_KK = cho_solve(factor, np.eye(len(residual_K)))
        variance_K = 1 / np.diag(precision_KK)
        return variance_K * (precision_KK @ residual_K), variance_K

    def at(self, indices: Indices) -> "Gaussian":
        """Return the distribution of some of the configurations before anything is measured."""
        return Gaussian.prior(self.mean_N[indices], self.features_NR[indices], self.variance_R, self.own_N[indices])

    def may_be_below(self, index: int) -> NDArray[np.bool_]:
        """Return for each configuration whether it may be below one of them: with a probability that is not negligible.

        The probability is negligible if the mean of the difference exceeds NEGLIGIBLE_DEVIATIONS of its standard
        deviations.
        """
        difference_N, deviation_N = self.difference_from(index)
        may: NDArray[np.bool_] = difference_N <= NEGLIGIBLE_DEVIATIONS * deviation_N
        return may

    def difference_from(self, index: int) -> tuple[Vector, Vector]:
        """Return the mean and the standard deviation of each configuration's difference from one of them."""
        covariance_N = self.covariance_with(np.array([index]))[:, 0]
        variance_N = self.variance_N + self.variance_N[index] - 2 * covariance_N
        return self.mean_N - self.mean_N[index], np.sqrt(np.maximum(variance_N, 0.0))

    def samples(self, indices: Sequence[int], num_samples: int) -> Matrix:
        """Return `num_samples` samples of some configurations, one a row, always with the same seed.

        A sample of the prior is moved by what it misses of the measurements (Matheron's rule; Wilson et al., Pathwise
        Conditioning of Gaussian Processes, 2021).
        """
        random, own_of = np.random.default_rng(0), np.union1d(indices, self.indices_K)
        features_MR = (self.features_NR[own_of] * np.sqrt(self.variance_R)).astype(np.float32)
        changes_SM = random.standard_normal((num_samples, features_MR.shape[1]), np.float32) @ features_MR.T
        own_M = np.sqrt(self.own_N[own_of]).astype(np.float32)
        changes_SM += random.standard_normal(changes_SM.shape, np.float32) * own_M
        of_indices = changes_SM[:, np.searchsorted(own_of, indices)]
        if not len(self.indices_K):
            return self.mean_N[list(indices)] + of_indices
        errors_SK = random.standard_normal((num_samples, len(self.noise_K))) * self.noise_K
        missed_SK = changes_SM[:, np.searchsorted(own_of, self.indices_K)] + errors_SK
        features_KR, is_same_KK = self.features_NR[self.indices_K], np.equal.outer(self.indices_K, self.indices_K)
        prior_KK = (features_KR * self.variance_R) @ features_KR.T + is_same_KK * self.own_N[self.indices_K]
        moves_SK = solve_triangular(np.linalg.cholesky(prior_KK + np.diag(self.noise_K**2)), missed_SK.T, lower=True).T
        samples_SI: Matrix = self.mean_N[list(indices)] + of_indices - moves_SK @ self.explained_NK[list(indices)].T
        return samples_SI

    def _prior_with(self, indices: Indices) -> Matrix:
        """Return the prior covariance of every configuration with some of them."""
        covariance: Matrix = self.features_NR @ (self.features_NR[indices] * self.variance_R).T
        covariance[indices, np.arange(len(indices))] += self.own_N[indices]
        return covariance

    def _residuals(self, values: Mapping[int, float], noise: float | Vector) -> tuple[Vector, Any]:
        """Return the residuals of the measured values and the Cholesky factor of their covariance."""
        indices = np.fromiter(values, int)
        residual_K = np.fromiter(values.values(), float) - self.mean_N[indices]
        noise_K = np.broadcast_to(noise, len(indices))
        covariance_KK = self.covariance_with(indices)[indices] + np.diag(noise_K**2)
        return residual_K, cho_factor(covariance_KK)


@dataclass(frozen=True)
class GaussianMixture:
    """A weighted mixture of Gaussians, each with its own measurement noise."""

    components: Sequence[Gaussian]
    noises: Sequence[float]
    """Standard deviation of a measurement under each component."""
    weights: Vector
    """Probability of each component."""

    @classmethod
    def posterior(
        cls,
        priors: Sequence[Gaussian],
        noises: Sequence[float],
        runs: Runs,
    ) -> Self:
        """Return the posterior after these runs, of every prior with every noise, equally probable at first."""
        components, logarithms, values = list[Gaussian](), list[float](), means(runs)
        spreads = _spreads(runs, noises)
        for prior in priors:
            cross_NJ, (measured, own_values) = prior.covariance_with(np.fromiter(values, int)), _measured(prior, values)
            for noise, spread in zip(noises, spreads, strict=True):
                noise_J = noise * _scale(runs)
                components.append(prior.condition(values, noise_J, cross_NJ))
                of_means = measured.log_marginal_likelihood(own_values, noise_J) if values else 0.0
                logarithms.append(of_means + spread)
        return cls(components, [*noises] * len(priors), _weights(np.array(logarithms)))

    @property
    def mean_N(self) -> Vector:
        """Return the mean of each configuration."""
        mean: Vector = self.weights @ np.stack([component.mean_N for component in self.components])
        return mean

    @property
    def deviation_N(self) -> Vector:
        """Return the standard deviation of each configuration."""
        mean_MN = np.stack([component.mean_N for component in self.components])
        variance_MN = np.stack([np.maximum(component.variance_N, 0.0) for component in self.components])
        deviation: Vector = np.sqrt(self.weights @ (variance_MN + np.square(mean_MN - self.mean_N)))
        return deviation

    @property
    def noise(self) -> float:
        """Return the standard deviation of a measurement: the root mean square of that of the components."""
        return math.sqrt(float(self.weights @ np.square(self.noises)))

    def probability_below(self, index: int) -> Vector:
        """Return the probability of each configuration to be below one of them; 0 for that one."""
        probability_N = np.zeros(len(self.mean_N))
        for weight, component in zip(self.weights, self.components, strict=True):
            difference_N, deviation_N = component.difference_from(index)
            probability_N += weight * ndtr(-difference_N / np.maximum(deviation_N, 1e-9))
        probability_N[index] = 0.0
        return probability_N

    def condition(self, values: Mapping[int, float]) -> "GaussianMixture":
        """Return the mixture with every component conditioned on `values`, and the weights as they are."""
        pairs = zip(self.components, self.noises, strict=True)
        return GaussianMixture(
            [component.condition(values, noise) for component, noise in pairs], self.noises, self.weights
        )

    def counts(self, num_samples: int) -> Iterator[tuple[Gaussian, int]]:
        """Yield each component with how many of about `num_samples` samples of the mixture are its own, if any."""
        counts = np.rint(self.weights * num_samples).astype(int).tolist()
        return ((component, count) for component, count in zip(self.components, counts, strict=True) if count)


def leave_one_out_residuals(priors: Sequence[Gaussian], noises: Sequence[float], runs: Runs) -> dict[int, Residual]:
    """Return the residual of each mean when it is predicted from the others, and its standard deviation."""
    if not runs:
        return {}
    values, scale_K = means(runs), _scale(runs)
    pairs = [(_measured(prior, values), noise * scale_K) for prior in priors for noise in noises]
    spread_M1 = np.array(_spreads(runs, noises) * len(priors))[:, None]
    parts = [prior.leave_one_out(own_values, noise) for (prior, own_values), noise in pairs]
    residual_MK, variance_MK = (np.stack(part) for part in zip(*parts, strict=True))
    log_of_all_M1 = np.array(
        [[prior.log_marginal_likelihood(own_values, noise)] for (prior, own_values), noise in pairs]
    )
    log_of_others_MK = log_of_all_M1 + spread_M1 + 0.5 * (np.log(variance_MK) + residual_MK**2 / variance_MK)
    weights_MK = _weights(log_of_others_MK)
    mean_K = (weights_MK * residual_MK).sum(axis=0)
    deviation_K = np.sqrt((weights_MK * (variance_MK + residual_MK**2)).sum(axis=0) - mean_K**2)
    return dict(zip(values, zip(mean_K.tolist(), deviation_K.tolist(), strict=True), strict=True))


def means(runs: Runs) -> dict[int, float]:
    """Return the mean of the runs of each configuration."""
    return {number: statistics.fmean(own) for number, own in runs.items()}


def _scale(runs: Runs) -> Vector:
    """Return the standard deviation of each mean in units of that of a run."""
    return 1 / np.sqrt([len(own) for own in runs.values()])


def _spreads(runs: Runs, noises: Sequence[float]) -> list[float]:
    """Return the log likelihood of how the runs of each configuration differ, for each noise."""
    groups = [[Timing(one, 0.0) for one in own] for own in runs.values()]
    return [sum(log_likelihood_of_spread(group, noise) for group in groups) for noise in noises]


def _measured(prior: Gaussian, values: Mapping[int, float]) -> tuple[Gaussian, dict[int, float]]:
    """Return the prior of the measured configurations alone, and the values by their index in it."""
    return prior.at(np.fromiter(values, int)), dict(enumerate(values.values()))


def _weights(log_marginal_likelihood_MK: Matrix) -> Matrix:
    """Return the weights of the components, which add up to 1 along the first axis."""
    unscaled_MK = np.exp(LEARNING_RATE * (log_marginal_likelihood_MK - log_marginal_likelihood_MK.max(axis=0)))
    weights_MK: Matrix = unscaled_MK / unscaled_MK.sum(axis=0)
    return weights_MK
