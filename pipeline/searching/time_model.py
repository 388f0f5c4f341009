"""The time model: seconds of an optimizer step of every configuration, with their uncertainty.

    seconds = num_passes x seconds of a pass + update x seconds of the update
    seconds of either = max(sum over kinds of amount x cost, that over calls on the host) on a GPU, their sum on a CPU

as in planning/step_time.py. The amounts are the work of a pass and of the update, counted in the trace of a
configuration: the FLOPs of matrix products by type, those of attention in one kernel apart, the bytes that other
operators move, the bytes copied to or from the host or sent to other ranks, and on the host the launches of kernels and
their calls into Python. The costs of their units and `update` are fitted by least squares to the logarithms of the
measured times, with priors wide enough for any device of a kind. So whatever a lever changes in the trace, its time
follows. On a GPU a kernel has a cost in the sum beside its launch, since it takes time to begin and to end.

The residual is a sum of random effects (random_effects.py). The noise of a measurement and the size of the residual are
not known: every pair of several values of both is a component of a mixture, weighted by its marginal likelihood.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import least_squares

from pipeline.memory.work import ATTENTION, OTHER_AMOUNTS, Work
from pipeline.planning.step_time import CALLS, seconds_by_kind
from pipeline.searching.candidates import Candidate
from pipeline.searching.gaussian import (
    Gaussian,
    GaussianMixture,
    Matrix,
    Residual,
    Runs,
    Vector,
    leave_one_out_residuals,
    means,
)
from pipeline.searching.random_effects import effects_of
from pipeline.training.timing import NOISES

RESIDUALS = (0.02, 0.05, 0.1, 0.2)
"""Prior standard deviations of the time model's residual, as fractions; equally probable at first."""
FIT_NOISE, FIT_RESIDUAL = 0.02, 0.1
"""Those with which the parameters are fitted."""
RATE = (0.0, 12.0)
"""Prior mean and standard deviation of the logarithm of the seconds of one float32 FLOP: any device."""
COSTS = {
    "cpu": {
        "float32": (0.0, 0.1),
        "float64": (0.0, 0.7),
        "bfloat16": (0.0, 0.7),
        "float16": (0.0, 0.7),  # and any other type
        "attention": (1.0, 1.5),
        "moved_bytes": (1.5, 1.0),
        "host_bytes": (1.5, 1.0),
        "launch": (13.0, 1.5),
        "python_call": (13.7, 1.5),
    },
    "cuda": {
        "float32": (0.0, 0.1),
        "float64": (0.0, 0.7),
        "tf32": (-1.5, 0.7),
        "bfloat16": (-2.0, 0.7),
        "float16": (-2.0, 0.7),
        "attention": (0.5, 0.7),
        "moved_bytes": (3.0, 0.7),
        "num_kernels": (18.0, 1.0),
        "host_bytes": (7.0, 1.0),
        "sent_bytes": (6.0, 1.5),
        "launch": (19.0, 1.0),
        "python_call": (19.7, 1.0),
    },
}
"""The same for the cost of one unit of each kind of work that counts, relative to that FLOP; that of attention is
relative to the cost of a product in its format."""
COUNTED = {"launch": "num_kernels", "python_call": "num_python_calls"}
"""The fields of Work that count the calls on the host."""
UPDATE = (0.0, 1.0)
"""The same for the update, relative to the cost of its work."""
LAUNCH_STARTS = (-2.0, 1.0, 4.0)
"""Starting points of the fit for the cost of a launch, relative to its prior mean."""


@dataclass(frozen=True)
class TimeModel:
    """The time model of a list of candidates, as a function of its parameters.

    The parameters are the logarithms of the rate, of the cost of each kind of work, of each kind of call on the host,
    and of the update.
    """

    candidates: Sequence[Candidate]
    kind: str
    """Kind of device: cpu or cuda."""

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of work in the order of their parameters: those that any candidate has, and the host's last."""
        works = [work for one in self.candidates for work in (one.pass_work, one.update_work)]
        others = [name for name in COSTS[self.kind] if name in (*OTHER_AMOUNTS, "sent_bytes")]
        others = [name for name in others if any(_amount(work, name) for work in works)]
        return [*sorted({name for work in works for name in work.matrix_flops}), *others, *CALLS]

    @cached_property
    def prior(self) -> tuple[Vector, Vector]:
        """The prior means and standard deviations of the parameters."""
        pairs = np.array([RATE, *map(self._cost, self.kinds), UPDATE])
        return pairs[:, 0], pairs[:, 1]

    @property
    def launch(self) -> int:
        """The number of the parameter of a launch."""
        return 1 + self.kinds.index("launch")

    def _cost(self, kind: str) -> tuple[float, float]:
        """Return the prior mean and standard deviation of the logarithm of the relative cost of a kind of work."""
        costs, name = COSTS[self.kind], kind.removesuffix(ATTENTION)
        mean, deviation = costs.get(name, costs["float16"])
        more, further = costs["attention"] if name != kind else (0.0, 0.0)
        return mean + more, math.hypot(deviation, further)

    @cached_property
    def _amounts(self) -> tuple[Matrix, Matrix, Vector, Vector]:
        """The work of a pass and of the update, the number of passes, and the tokens of a step."""
        candidates, kinds = self.candidates, self.kinds
        of_pass_NK = np.array([[_amount(one.pass_work, kind) for kind in kinds] for one in candidates], float)
        of_update_NK = np.array([[_amount(one.update_work, kind) for kind in kinds] for one in candidates], float)
        passes = np.array([one.num_passes for one in candidates], float)
        tokens = np.array([one.num_tokens for one in candidates], float)
        return of_pass_NK, of_update_NK, passes, tokens

    def evaluate(self, parameters: Vector, numbers: Sequence[int] | slice = slice(None)) -> tuple[Vector, Matrix]:
        """Return the logarithm of the seconds per token of some candidates, and its derivative by each parameter."""
        of_pass_NK, of_update_NK, passes, tokens = (part[numbers] for part in self._amounts)
        rate, *log_costs, update = parameters
        costs_K, is_queued = np.exp(log_costs), self.kind == "cuda"
        of_update_NK = np.exp(update) * seconds_by_kind(of_update_NK, costs_K, is_queued=is_queued)
        seconds_NK = passes[:, None] * seconds_by_kind(of_pass_NK, costs_K, is_queued=is_queued) + of_update_NK
        seconds = seconds_NK.sum(axis=1)
        slopes_NP = np.column_stack([seconds, seconds_NK, of_update_NK.sum(axis=1)]) / seconds[:, None]
        return rate + np.log(seconds / tokens), slopes_NP


def _amount(work: Work, kind: str) -> float:
    """Return how much work there is of a kind."""
    if kind == "sent_bytes":
        return sum(work.sent_bytes.values())
    name = COUNTED.get(kind, kind)
    amount: float = getattr(work, name) if name in OTHER_AMOUNTS else work.matrix_flops.get(kind, 0.0)
    return amount


@dataclass(frozen=True)
class TimeFit:
    """The time model fitted to measurements."""

    posterior: GaussianMixture
    """Of the logarithm of the seconds per token of each candidate."""
    residual_rms: float
    """Root mean square residual of the fitted model, without what untraced values explain, as a fraction; 0 if nothing
    is measured."""
    leave_one_out: Mapping[int, Residual]
    """Residual of each measured candidate when it is predicted from the others, and its standard deviation; positive
    where it was slower than predicted."""


def fit(candidates: Sequence[Candidate], runs: Runs, kind: str) -> TimeFit:
    """Return the time model on a kind of device, fitted to the log seconds per token of the runs that count."""
    model, effects = TimeModel(candidates, kind), effects_of(candidates)
    mean, deviation = model.prior
    known = list(runs)
    values_K = np.fromiter(means(runs).values(), float)
    parameters = _fit(model, known, values_K, effects.at(known).covariance(FIT_RESIDUAL))
    fitted_N, slopes_NP = model.evaluate(parameters)
    expected_N = fitted_N + slopes_NP @ (mean - parameters)
    features_NR = np.hstack([slopes_NP, effects.features_NR])
    priors = [
        Gaussian.prior(
            expected_N,
            features_NR,
            np.concatenate([deviation**2, effects.variances(residual)]),
            effects.own(residual),
        )
        for residual in RESIDUALS
    ]
    residual_K = values_K - fitted_N[known]
    residual_K = residual_K - effects.at(known).untraced_part(residual_K, FIT_RESIDUAL, FIT_NOISE)
    rms = float(np.sqrt(np.mean(residual_K**2))) if known else 0.0
    posterior = GaussianMixture.posterior(priors, NOISES, runs)
    return TimeFit(posterior, rms, leave_one_out_residuals(priors, NOISES, runs))


def _fit(model: TimeModel, known: list[int], values_K: Vector, residual_KK: Matrix) -> Vector:
    """Return the most probable parameters: generalised least squares with the priors as further residuals."""
    mean, deviation = model.prior
    if not known:
        return mean
    whiten = np.linalg.inv(np.linalg.cholesky(residual_KK + FIT_NOISE**2 * np.eye(len(known))))

    def residuals(parameters: Vector) -> Vector:
        return np.concatenate(
            [whiten @ (values_K - model.evaluate(parameters, known)[0]), (parameters - mean) / deviation]
        )

    def slopes(parameters: Vector) -> Matrix:
        return np.vstack([-whiten @ model.evaluate(parameters, known)[1], np.diag(1 / deviation)])

    fits = []
    for launch in LAUNCH_STARTS:  # where launches never matter, their parameter has no slope to follow
        start = mean.copy()
        start[model.launch] += launch
        start[0] += float(np.mean(values_K - model.evaluate(start, known)[0]))
        fits.append(least_squares(residuals, start, slopes, method="lm"))
    best: Vector = min(fits, key=lambda one: float(one.cost)).x
    return best
