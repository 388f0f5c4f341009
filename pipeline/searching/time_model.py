"""The time model: seconds of an optimizer step of every configuration, with their uncertainty.

    seconds = num_passes x max(launch, fixed[precision] + rate[precision] x size) x work + update
    size = micro_batch_size ** (1 + growth)
    work = 1 + recomputation x (operations / fewest operations - 1)

`operations` are the counted operations of one sequence, recomputation included, and `fewest operations` those of the
candidate with the fewest. `recomputation` exceeds 1 where recomputing takes longer than its share of the operations,
because operations that are not counted are repeated, too. `growth` is positive where a sequence takes longer in a large
micro-batch, less of which fits the caches.

The parameters are fitted by least squares to the logarithms of the measured times, with priors wide enough for any
device. The residual is a Gaussian process, smooth in the logarithm of the micro-batch size. The noise of a measurement
and the size of the residual are not known: every pair of several values of both is a component of a mixture, weighted
by its marginal likelihood.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import least_squares

from pipeline.searching.candidates import Candidate
from pipeline.searching.gaussian import (
    Gaussian,
    GaussianMixture,
    Matrix,
    Vector,
    correlation_of,
    leave_one_out_residuals,
)

NOISES = (0.003, 0.01, 0.03, 0.06)
"""Prior standard deviations of a measured time from process to process, as fractions; equally probable at first."""
RESIDUALS = (0.02, 0.05, 0.1, 0.2)
"""Prior standard deviations of the time model's residual, as fractions; equally probable at first."""
FIT_NOISE, FIT_RESIDUAL = 0.02, 0.1
"""Those with which the parameters are fitted."""
LENGTH_SCALE = 1.0
"""Doublings of the micro-batch size over which the residual changes."""
CORRELATION = 0.8
"""Correlation of the residuals of two checkpointing policies, or of two precisions."""
RATE = (0.0, 12.0)
"""Prior mean and standard deviation of the logarithm of the seconds of one sequence: any device."""
SPEEDUP = {"fp32": (0.0, 0.1)}
"""The same for a precision's rate, relative to the shared one; for the precisions that are not named:"""
OTHER_SPEEDUP = {"cuda": (-0.5, 0.5), "cpu": (0.0, 0.5)}
"""By kind of device: on a CPU casts cost what narrower products save."""
OVERHEAD = {"fp32": (0.0, 0.1)}
"""The same for a precision's fixed cost of a pass, relative to the shared one; for those that are not named:"""
OTHER_OVERHEAD = (0.0, 1.0)
FIXED, LAUNCH, UPDATE = (np.log(0.5), 1.5), (np.log(0.5), 1.5), (np.log(0.5), 1.5)
"""The same for the fixed cost of a pass, its kernel launches and the update, in units of one sequence."""
RECOMPUTATION = (0.2, 0.5)
"""The same for the time of recomputation, relative to its share of the operations."""
GROWTH = (0.0, 0.1)
"""The same for the number added to the exponent of the micro-batch size, which is not a logarithm."""
LAUNCH_STARTS = np.log([0.5, 2.0, 8.0, 32.0])
"""Starting points of the fit for the cost of launches, in units of one sequence."""


@dataclass(frozen=True)
class TimeModel:
    """The time model of a list of candidates, as a function of its parameters.

    The parameters are rate, speed-ups, overheads, recomputation, growth, fixed, launch and update; all but growth are
    logarithms.
    """

    candidates: Sequence[Candidate]
    kind: str
    """Kind of device: cpu or cuda."""

    @property
    def precisions(self) -> list[str]:
        """Return the precisions in the order of their parameters."""
        return sorted({candidate.precision for candidate in self.candidates})

    @property
    def prior(self) -> tuple[Vector, Vector]:
        """Return the prior means and standard deviations of the parameters."""
        speedups = [SPEEDUP.get(name, OTHER_SPEEDUP[self.kind]) for name in self.precisions]
        overheads = [OVERHEAD.get(name, OTHER_OVERHEAD) for name in self.precisions]
        pairs = np.array([RATE, *speedups, *overheads, RECOMPUTATION, GROWTH, FIXED, LAUNCH, UPDATE])
        return pairs[:, 0], pairs[:, 1]

    def __call__(self, parameters: Vector) -> Vector:
        """Return the logarithm of the seconds per token of each candidate."""
        rate, *own, recomputation, growth, fixed, launch, update = parameters
        speedups, overheads = own[: len(self.precisions)], own[len(self.precisions) :]
        number_of = {name: number for number, name in enumerate(self.precisions)}
        numbers = [number_of[candidate.precision] for candidate in self.candidates]
        sizes = np.array([candidate.micro_batch_size for candidate in self.candidates])
        passes = np.array([candidate.num_passes for candidate in self.candidates])
        flops = np.array([candidate.flops for candidate in self.candidates])
        tokens = np.array([candidate.num_tokens for candidate in self.candidates])
        per_sequence, per_pass = np.exp(speedups)[numbers], np.exp(overheads)[numbers]
        pass_cost = np.maximum(np.exp(launch), per_pass * np.exp(fixed) + per_sequence * sizes ** (1 + growth))
        work = 1 + np.exp(recomputation) * (flops / flops.min() - 1)
        seconds = passes * pass_cost * work + np.exp(update)
        logarithms: Vector = rate + np.log(seconds / tokens)
        return logarithms


@dataclass(frozen=True)
class TimeFit:
    """The time model fitted to measurements."""

    posterior: GaussianMixture
    """Of the logarithm of the seconds per token of each candidate."""
    residual_rms: float
    """Root mean square residual of the fitted model, as a fraction; 0 if nothing is measured."""
    leave_one_out: Mapping[int, float]
    """Standardized leave-one-out residual of each measured candidate; positive where it was slower than predicted."""


def fit(candidates: Sequence[Candidate], measured: Mapping[int, float], kind: str) -> TimeFit:
    """Return the time model on a kind of device, fitted to the measured log seconds per token, by index."""
    model, correlation_NN = TimeModel(candidates, kind), _residual_correlation(candidates)
    mean, deviation = model.prior
    known = list(measured)
    parameters = _fit(model, known, np.array([measured[number] for number in known]), FIT_RESIDUAL**2 * correlation_NN)
    fitted = model(parameters)
    slopes_NP = _slopes(model, parameters)
    expected, of_model_NN = fitted + slopes_NP @ (mean - parameters), (slopes_NP * deviation**2) @ slopes_NP.T
    priors = [
        (Gaussian(expected, of_model_NN + residual**2 * correlation_NN), noise)
        for noise, residual in product(NOISES, RESIDUALS)
    ]
    residuals = [measured[number] - fitted[number] for number in known]
    rms = float(np.sqrt(np.mean(np.square(residuals)))) if residuals else 0.0
    return TimeFit(GaussianMixture.posterior(priors, measured), rms, leave_one_out_residuals(priors, measured))


def _fit(model: TimeModel, known: list[int], values: Vector, residual_NN: Matrix) -> Vector:
    """Return the most probable parameters: generalised least squares with the priors as further residuals."""
    mean, deviation = model.prior
    if not known:
        return mean
    covariance = residual_NN[np.ix_(known, known)] + FIT_NOISE**2 * np.eye(len(known))
    whiten = np.linalg.inv(np.linalg.cholesky(covariance))

    def residuals(parameters: Vector) -> Vector:
        return np.concatenate([whiten @ (values - model(parameters)[known]), (parameters - mean) / deviation])

    fits = []
    for launch in LAUNCH_STARTS:  # where launches never matter, their parameter has no slope to follow
        start = mean.copy()
        start[-2] = launch
        start[0] = float(np.mean(values - model(start)[known]))
        fits.append(least_squares(residuals, start))
    best: Vector = min(fits, key=lambda one: float(one.cost)).x
    return best


def _slopes(model: TimeModel, parameters: Vector) -> Matrix:
    """Return the derivative of each candidate's logarithm by each parameter, from central differences."""
    step = 1e-4
    columns = [
        (model(parameters + change) - model(parameters - change)) / (2 * step)
        for change in step * np.eye(len(parameters))
    ]
    return np.stack(columns, axis=1)


def _residual_correlation(candidates: Sequence[Candidate]) -> Matrix:
    """Return the correlation of the residuals of each pair of candidates."""
    doublings = np.log2([candidate.micro_batch_size for candidate in candidates])
    distance_NN = (doublings[:, None] - doublings[None, :]) / LENGTH_SCALE
    between_groups = correlation_of([candidate.group for candidate in candidates], CORRELATION)
    correlation: Matrix = np.exp(-0.5 * distance_NN**2) * between_groups
    return correlation
