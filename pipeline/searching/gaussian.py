"""Gaussian posteriors of a quantity of every configuration, conditioned on measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.special import log_ndtr

Vector = NDArray[np.float64]
"""One number for each configuration."""
Matrix = NDArray[np.float64]
"""One number for each pair of configurations."""

LEARNING_RATE = 0.3
"""Power of the marginal likelihood in the weights; below 1, since every component is misspecified (Gruenwald and van
Ommen, Inconsistency of Bayesian Inference for Misspecified Linear Models, 2017)."""


@dataclass(frozen=True)
class Gaussian:
    """A joint Gaussian distribution of the logarithm of a quantity of N configurations."""

    mean_N: Vector
    covariance_NN: Matrix

    @property
    def deviation_N(self) -> Vector:
        """Return the standard deviations."""
        deviation: Vector = np.sqrt(np.maximum(np.diag(self.covariance_NN), 0.0))
        return deviation

    def condition(self, values: Mapping[int, float], noise: float) -> "Gaussian":
        """Return the posterior after measuring `values`, by index, each with a standard deviation of `noise`.

        Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.23 and 2.24.
        """
        if not values:
            return self
        indices, residual_K, factor = self._residuals(values, noise)
        cross_NK = self.covariance_NN[:, indices]
        mean = self.mean_N + cross_NK @ cho_solve(factor, residual_K)
        return Gaussian(mean, self.covariance_NN - cross_NK @ cho_solve(factor, cross_NK.T))

    def condition_above(self, bounds: Mapping[int, float], noise: float) -> "Gaussian":
        """Return the distribution after learning that these values, measured with `noise`, lie above their bounds.

        The mean moves to that of the truncated Gaussian. The covariance stays: a smaller one could raise the
        probability that a value is low, which a lower bound never does.
        """
        result = self
        for index, bound in bounds.items():
            deviation = float(np.sqrt(result.covariance_NN[index, index] + noise**2))
            scaled = (bound - result.mean_N[index]) / deviation
            hazard = np.exp(-0.5 * scaled**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(-scaled))
            result = Gaussian(result.mean_N + result.covariance_NN[:, index] * hazard / deviation, self.covariance_NN)
        return result

    def log_marginal_likelihood(self, values: Mapping[int, float], noise: float) -> float:
        """Return the log marginal likelihood of `values`, up to a constant (ibid., equation 2.30)."""
        _, residual_K, factor = self._residuals(values, noise)
        return float(-0.5 * residual_K @ cho_solve(factor, residual_K) - np.log(np.diag(factor[0])).sum())

    def leave_one_out(self, values: Mapping[int, float], noise: float) -> tuple[Vector, Vector]:
        """Return the residual of each of `values` when it is predicted from the others, and its variance.

        Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equation 5.12.
        """
        indices, residual_K, factor = self._residuals(values, noise)
        precision_KK = cho_solve(factor, np.eye(len(indices)))
        variance_K = 1 / np.diag(precision_KK)
        return variance_K * (precision_KK @ residual_K), variance_K

    def marginal(self, indices: list[int]) -> "Gaussian":
        """Return the distribution of some of the configurations."""
        return Gaussian(self.mean_N[indices], self.covariance_NN[np.ix_(indices, indices)])

    def samples(self, num_samples: int) -> Matrix:
        """Return `num_samples` samples, one a row, always with the same seed."""
        values, vectors = np.linalg.eigh(self.covariance_NN)
        root_NN = vectors * np.sqrt(np.maximum(values, 0.0))
        noise_SN = np.random.default_rng(0).standard_normal((num_samples, len(self.mean_N)))
        samples_SN: Matrix = self.mean_N + noise_SN @ root_NN.T
        return samples_SN

    def _residuals(self, values: Mapping[int, float], noise: float) -> tuple[NDArray[np.int_], Vector, Any]:
        """Return the indices of the measured, their residuals and the Cholesky factor of the residuals' covariance."""
        indices = np.fromiter(values, int)
        residual_K = np.fromiter(values.values(), float) - self.mean_N[indices]
        covariance_KK = self.covariance_NN[np.ix_(indices, indices)] + noise**2 * np.eye(len(indices))
        return indices, residual_K, cho_factor(covariance_KK)


@dataclass(frozen=True)
class GaussianMixture:
    """A weighted mixture of Gaussians, each with its own measurement noise."""

    components: Sequence[Gaussian]
    noises: Sequence[float]
    """Standard deviation of a measurement under each component."""
    weights: Vector
    """Probability of each component."""

    @classmethod
    def posterior(cls, priors: Sequence[tuple[Gaussian, float]], values: Mapping[int, float]) -> Self:
        """Return the posterior after measuring `values`, of priors with equal weights, each with its noise."""
        logarithms = [prior.log_marginal_likelihood(values, noise) if values else 0.0 for prior, noise in priors]
        components = [prior.condition(values, noise) for prior, noise in priors]
        return cls(components, [noise for _, noise in priors], _weights(np.array(logarithms)))

    @property
    def mean_N(self) -> Vector:
        """Return the mean of each configuration."""
        mean: Vector = self.weights @ np.stack([component.mean_N for component in self.components])
        return mean

    def condition(self, values: Mapping[int, float]) -> "GaussianMixture":
        """Return the mixture with every component conditioned on `values`, and the weights as they are."""
        pairs = zip(self.components, self.noises, strict=True)
        return GaussianMixture(
            [component.condition(values, noise) for component, noise in pairs], self.noises, self.weights
        )

    def samples(self, indices: list[int], num_samples: int) -> Matrix:
        """Return about `num_samples` samples of some configurations, one a row, always with the same seed."""
        counts = np.rint(self.weights * num_samples).astype(int)
        pairs = zip(self.components, counts, strict=True)
        return np.concatenate([component.marginal(indices).samples(count) for component, count in pairs if count])


def leave_one_out_residuals(priors: Sequence[tuple[Gaussian, float]], values: Mapping[int, float]) -> dict[int, float]:
    """Return the standardized leave-one-out residual of each of `values`: positive where it exceeds its prediction."""
    if not values:
        return {}
    pairs = [prior.leave_one_out(values, noise) for prior, noise in priors]
    residual_MK, variance_MK = (np.stack(parts) for parts in zip(*pairs, strict=True))
    log_of_all_M1 = np.array([[prior.log_marginal_likelihood(values, noise)] for prior, noise in priors])
    log_of_others_MK = log_of_all_M1 + 0.5 * (np.log(variance_MK) + residual_MK**2 / variance_MK)
    weights_MK = _weights(log_of_others_MK)
    mean_K = (weights_MK * residual_MK).sum(axis=0)
    deviation_K = np.sqrt((weights_MK * (variance_MK + residual_MK**2)).sum(axis=0) - mean_K**2)
    return dict(zip(values, (mean_K / deviation_K).tolist(), strict=True))


def _weights(log_marginal_likelihood_MK: Matrix) -> Matrix:
    """Return the weights of the components, which add up to 1 along the first axis."""
    unscaled_MK = np.exp(LEARNING_RATE * (log_marginal_likelihood_MK - log_marginal_likelihood_MK.max(axis=0)))
    weights_MK: Matrix = unscaled_MK / unscaled_MK.sum(axis=0)
    return weights_MK


def correlation_of(groups: "list[tuple[object, ...]]", per_difference: float) -> Matrix:
    """Return the correlation of each pair: the factor `per_difference` for every position in which they differ."""
    columns = [np.array([repr(group[axis]) for group in groups]) for axis in range(len(groups[0]))]
    differing = sum((column[:, None] != column[None, :]).astype(float) for column in columns)
    correlation: Matrix = np.power(per_difference, differing * np.ones((len(groups), len(groups))))
    return correlation
