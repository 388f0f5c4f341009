"""What an optimizer step of every configuration will cost: a law of a few parameters, and how far off it may be.

    seconds = num_passes x max(launch, fixed[precision] + rate[precision] x size) x work + update
    size = micro_batch_size ** (1 + growth)
    work = 1 + recomputation x (operations / fewest operations - 1)

`operations` are the counted ones of a sequence, recomputation included, against those of the candidate with the fewest.
Recomputation may take longer than its share of them, since what is not counted is done again, too; and a sequence takes
longer in a large micro-batch, of which a cache holds less.

The parameters are fitted by least squares to the logarithms of what was measured, with priors broad enough for any
device; what the law leaves over is a Gaussian process that is smooth in the logarithm of the micro-batch size. How
noisy measurements are and how much the law leaves over is learned too: several values of both are tried, and those
count most that make what was measured most probable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import least_squares

from pipeline.searching.candidates import Candidate
from pipeline.searching.gaussian import Belief, Matrix, Mixture, Vector, similarity, surprises

NOISES = (0.003, 0.01, 0.03, 0.06)
"""Standard deviations that a measured time may have from process to process, as shares; all alike probable at first."""
OFFS = (0.02, 0.05, 0.1, 0.2)
"""Standard deviations that what the law leaves over may have, likewise."""
NOISE, OFF = 0.02, 0.1
"""Those with which the law's parameters are fitted."""
OCTAVES = 1.0
"""Doublings of the micro-batch over which that changes."""
OF_A_DIFFERENCE = 0.8
"""Correlation of what the law leaves over between two policies, or two precisions."""
RATE = (0.0, 12.0)
"""Mean and standard deviation of the logarithm of the seconds of a sequence: any device."""
SPEEDUP = {"fp32": (0.0, 0.1)}
"""Of a precision's rate against the shared one; those that are not named:"""
OTHER_SPEEDUP = {"cuda": (-0.5, 0.5), "cpu": (0.0, 0.5)}
"""By kind of device: a processor spends on casts what narrower products save."""
OVERHEAD = {"fp32": (0.0, 0.1)}
"""Of a precision's fixed cost of a pass against the shared one; those that are not named:"""
OTHER_OVERHEAD = (0.0, 1.0)
FIXED, LAUNCH, UPDATE = (np.log(0.5), 1.5), (np.log(0.5), 1.5), (np.log(0.5), 1.5)
"""Of the fixed cost of a pass, its launches, and the update, in sequences."""
RECOMPUTATION = (0.2, 0.5)
"""Of the time of recomputation against its share of the operations."""
GROWTH = (0.0, 0.1)
"""Mean and standard deviation of what is added to the power of the micro-batch: no logarithm."""
LAUNCH_STARTS = np.log([0.5, 2.0, 8.0, 32.0])
"""Where the fit begins to look for the cost of launches, in sequences."""


@dataclass(frozen=True)
class Law:
    """The law for a list of candidates.

    Its parameters are rate, speed-ups, overheads, recomputation, growth, fixed, launch and update; all are logarithms
    but growth.
    """

    candidates: Sequence[Candidate]
    kind: str
    """Of device: cpu or cuda."""

    @property
    def precisions(self) -> list[str]:
        """Return the names of the precisions, in the order of their parameters."""
        return sorted({candidate.precision for candidate in self.candidates})

    @property
    def prior(self) -> tuple[Vector, Vector]:
        """Return mean and standard deviation of the parameters before anything is measured."""
        speedups = [SPEEDUP.get(name, OTHER_SPEEDUP[self.kind]) for name in self.precisions]
        overheads = [OVERHEAD.get(name, OTHER_OVERHEAD) for name in self.precisions]
        pairs = np.array([RATE, *speedups, *overheads, RECOMPUTATION, GROWTH, FIXED, LAUNCH, UPDATE])
        return pairs[:, 0], pairs[:, 1]

    def __call__(self, parameters: Vector) -> Vector:
        """Return the logarithm of each candidate's seconds per token."""
        rate, *own, recomputation, growth, fixed, launch, update = parameters
        speedups, overheads = own[: len(self.precisions)], own[len(self.precisions) :]
        number_of = {name: number for number, name in enumerate(self.precisions)}
        numbers = [number_of[candidate.precision] for candidate in self.candidates]
        sizes = np.array([candidate.micro_batch_size for candidate in self.candidates])
        passes = np.array([candidate.num_passes for candidate in self.candidates])
        flops = np.array([candidate.flops for candidate in self.candidates])
        tokens = np.array([candidate.num_tokens for candidate in self.candidates])
        per_sequence, per_pass = np.exp(speedups)[numbers], np.exp(overheads)[numbers]
        a_pass = np.maximum(np.exp(launch), per_pass * np.exp(fixed) + per_sequence * sizes ** (1 + growth))
        work = 1 + np.exp(recomputation) * (flops / flops.min() - 1)
        seconds = passes * a_pass * work + np.exp(update)
        logarithms: Vector = rate + np.log(seconds / tokens)
        return logarithms


@dataclass(frozen=True)
class TimeFit:
    """The law fitted to measurements."""

    belief: Mixture
    """Of the logarithm of each candidate's seconds per token."""
    off: float
    """Root mean square of what the fitted law alone leaves over, as a share; 0 where nothing is measured."""
    surprises: Mapping[int, float]
    """By how many standard deviations each measured one was slower than the others let expect."""


def fit(candidates: Sequence[Candidate], measured: Mapping[int, float], kind: str) -> TimeFit:
    """Return what is believed of every candidate on a kind of device after measuring some: log seconds per token."""
    law, smooth_NN = Law(candidates, kind), _smooth(candidates)
    mean, deviation = law.prior
    known = list(measured)
    parameters = _fit(law, known, np.array([measured[number] for number in known]), OFF**2 * smooth_NN)
    at = law(parameters)
    slopes_NP = _slopes(law, parameters)
    expected, of_law_NN = at + slopes_NP @ (mean - parameters), (slopes_NP * deviation**2) @ slopes_NP.T
    priors = [(Belief(expected, of_law_NN + off**2 * smooth_NN), noise) for noise, off in product(NOISES, OFFS)]
    left = [measured[number] - at[number] for number in known]
    off = float(np.sqrt(np.mean(np.square(left)))) if left else 0.0
    return TimeFit(Mixture.of(priors, measured), off, surprises(priors, measured))


def _fit(law: Law, known: list[int], values: Vector, smooth_NN: Matrix) -> Vector:
    """Return the most probable parameters: generalised least squares with the priors as further residuals."""
    mean, deviation = law.prior
    if not known:
        return mean
    covariance = smooth_NN[np.ix_(known, known)] + NOISE**2 * np.eye(len(known))
    whiten = np.linalg.inv(np.linalg.cholesky(covariance))

    def residuals(parameters: Vector) -> Vector:
        return np.concatenate([whiten @ (values - law(parameters)[known]), (parameters - mean) / deviation])

    fits = []
    for launch in LAUNCH_STARTS:  # where launches never matter, their parameter has no slope to follow
        start = mean.copy()
        start[-2] = launch
        start[0] = float(np.mean(values - law(start)[known]))
        fits.append(least_squares(residuals, start))
    best: Vector = min(fits, key=lambda one: float(one.cost)).x
    return best


def _slopes(law: Law, parameters: Vector) -> Matrix:
    """Return the derivative of each candidate's logarithm by each parameter."""
    step = 1e-4
    columns = [
        (law(parameters + change) - law(parameters - change)) / (2 * step) for change in step * np.eye(len(parameters))
    ]
    return np.stack(columns, axis=1)


def _smooth(candidates: Sequence[Candidate]) -> Matrix:
    """Return the correlation of what the law leaves over."""
    octaves = np.log2([candidate.micro_batch_size for candidate in candidates])
    distance_NN = (octaves[:, None] - octaves[None, :]) / OCTAVES
    alike = similarity([candidate.group for candidate in candidates], OF_A_DIFFERENCE)
    correlation: Matrix = np.exp(-0.5 * distance_NN**2) * alike
    return correlation
