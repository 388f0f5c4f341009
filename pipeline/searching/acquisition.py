"""Acquisition: which configuration to measure next, and how far the best measured one can be from the best of all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from pipeline.base.by_key import grouped
from pipeline.config.space import Value
from pipeline.searching import memory_model, time_model
from pipeline.searching.candidates import Candidate
from pipeline.searching.certificate import REPEATED_GAPS
from pipeline.searching.gaussian import GaussianMixture, Residual, Vector
from pipeline.searching.measurements import Measurements

NUM_SAMPLES = 1000
"""Posterior samples from which a bound is estimated."""
CONFIDENCE = 0.95
"""Probability with which a bound is stated."""
SHARE_OF_SAMPLES = 0.98
"""Fraction of the samples in which it holds: more than CONFIDENCE, since the model's samples vary less than the times.

Chosen with benchmarks/search_noise.py on the tables of gpt2-nano and llama-nano.
"""
MAX_RESIDUAL = max(time_model.RESIDUALS)
"""Root mean square residual, as a fraction, above which the time model is not adequate: no component expects more."""
MIN_MEASUREMENTS = 4
"""Measurements before the time model is judged or the search ends."""
OUTLIER_DEVIATIONS = 2.0
"""Standard deviations by which a run is slower than the others predict, above which it is an outlier."""
DECISIVE_DEVIATIONS = 1.0
"""The same where it would be the fastest without that run."""
MOST_UNFIT = 1.0
"""Expected number of running trials that do not fit, up to which one that is not feasible may run."""


Rivals = tuple[int, ...]
"""Measured candidates that another one has to beat."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The goal of a search and its limits."""

    budget_bytes: int
    fit_confidence: float = 0.95
    """Minimum probability of fitting for a configuration to be feasible."""
    gap: float = 0.01
    """The search ends once no unmeasured configuration is likely to be faster by more than this fraction."""
    kind: str = "cpu"
    """Kind of device: cpu or cuda."""
    whole_front: bool = False
    """Whether to search the whole Pareto front of memory and throughput instead of the highest throughput alone."""


@dataclass(frozen=True, kw_only=True)
class Acquisition:
    """The candidates evaluated on the measurements so far."""

    next: int | None
    """Index of the candidate to measure next, given that all running trials take their expected time; None if no
    measurement is worth its time then."""
    best_remaining: int | None
    """Index of the candidate to measure if one is demanded: `next`, else the best feasible one that is left."""
    is_waiting: bool
    """Whether `next` is None only until running trials have ended, which may leave something worth its time."""
    bound: float | None
    """Upper bound, with CONFIDENCE, of the fraction by which the best of all candidates is faster than the best
    measured one; None if nothing that fits was measured."""
    remaining_improvement: float | None
    """The same bound for the best unmeasured candidate alone: what further measurements may gain."""
    feasible: frozenset[int]
    """Indices of the candidates that fit with a probability of at least `fit_confidence`."""
    possible: frozenset[int]
    """Of those over which the bound ranges: the feasible ones, and all without an own prediction that may fit."""
    probability_of_fit: Vector
    """Probability with which each fits the budget; 0 of those with a value that fails."""
    failing: Mapping[int, tuple[str, Value]]
    """The candidates with a value that fails, which are left out, each with its dimension and that value."""
    predicted_seconds: Vector | None
    """Predicted seconds of an optimizer step of each; None before anything was measured."""
    posterior: GaussianMixture
    """Of the logarithm of the seconds per token of each."""
    incumbent: int | None
    """Index of the best measured candidate; None if nothing that fits was measured, or the whole front is searched."""
    residual_rms: float
    """Root mean square residual of the time model, as a fraction."""
    again: int | None
    """Index of a candidate to measure again; None if there is none.

    That is the fastest one, since the fastest of many noisy runs is likely to be a lucky one; or a slow outlier: other
    load on the machine can make a run slower, and nothing makes it faster. These are measured twice at most. Once
    nothing else is worth a trial it is one of the two fastest, until the bound is at most REPEATED_GAPS times `gap`.
    """

    @property
    def is_adequate(self) -> bool:
        """Whether the time model describes the measurements well enough."""
        return self.residual_rms <= MAX_RESIDUAL


def evaluate(candidates: Sequence[Candidate], measured: Measurements, rules: Rules) -> Acquisition:
    """Return what to measure next, and the bound that holds if nothing more is measured."""
    probability_N = memory_model.probability_of_fit(
        candidates, measured.peak_bytes, rules.budget_bytes, rules.kind, measured.peak_lower_bounds
    )
    failing = measured.with_failing_value([one.choice for one in candidates])
    probability_N[[*failing]] = 0.0
    feasible = frozenset(np.flatnonzero(probability_N >= rules.fit_confidence).tolist())
    is_uncertain = [one.predicted_bytes is None or one.is_expected for one in candidates]
    possible = feasible | {n for n in range(len(candidates)) if is_uncertain[n] and probability_N[n]}
    time = time_model.fit(candidates, measured.counting_runs, rules.kind)
    mean_N = time.posterior.mean_N
    rivals = _rivals(candidates, measured, rules.whole_front)
    remaining_improvement, bound = _improvements(time.posterior, measured, rivals, possible - measured.ended)
    is_open = is_worth_it = _is_open(measured, remaining_improvement, rules.gap)
    # the bound knows nothing of the running trials, and the choice takes them as measured at their expected times
    expected_seconds = {number: float(mean_N[number]) for number in measured.running}
    expected, posterior = measured.as_expected(expected_seconds, feasible), time.posterior.condition(expected_seconds)
    rivals, remaining = _rivals(candidates, expected, rules.whole_front), possible - measured.taken
    if is_open and measured.running:
        expected_improvement, _ = _improvements(posterior, expected, rivals, remaining)
        is_worth_it = _is_open(expected, expected_improvement, rules.gap)
    improvement_N = _expected_improvement(expected, rivals, posterior)
    wanted = _choose(improvement_N, probability_N, mean_N, possible, measured.taken, rules, is_open=is_worth_it)
    following = None if _is_held_back(wanted, feasible, measured.running, probability_N) else wanted
    best_remaining = max(remaining, key=lambda number: float(improvement_N[number]), default=None)
    tokens_N = np.array([candidate.num_tokens for candidate in candidates])
    few = len(measured.log_seconds) < MIN_MEASUREMENTS
    again = None if few else _again(measured, time.leave_one_out)
    is_noisy = wanted is None and not is_open and bound is not None and bound > REPEATED_GAPS * rules.gap
    if again is None and is_noisy and not rules.whole_front:
        again = _contender(measured, improvement_N)
    return Acquisition(
        next=following,
        best_remaining=best_remaining if following is None else following,
        is_waiting=following is None and bool(measured.running) and (is_open or wanted is not None),
        bound=bound,
        remaining_improvement=remaining_improvement,
        feasible=feasible,
        possible=possible,
        probability_of_fit=probability_N,
        failing=failing,
        predicted_seconds=np.exp(mean_N) * tokens_N if measured.log_seconds else None,
        posterior=time.posterior,
        incumbent=None if rules.whole_front else measured.incumbent,
        residual_rms=0.0 if few else time.residual_rms,
        again=again,
    )


def _is_open(measured: Measurements, remaining_improvement: float | None, gap: float) -> bool:
    """Return whether another configuration may be faster than all measured ones by more than `gap`."""
    few = len(measured.log_seconds) < MIN_MEASUREMENTS
    return few or remaining_improvement is None or remaining_improvement > gap


def _again(measured: Measurements, leave_one_out: Mapping[int, Residual]) -> int | None:
    """Return the fastest candidate, else the outlier of the greatest standardized residual, of those that fit.

    Only one that has a single run is returned, and no second run of it that failed.
    """
    once = measured.fitting - measured.running - measured.repeated
    if measured.incumbent in once:
        return measured.incumbent
    fastest = min((measured.log_seconds[number] for number in measured.fitting), default=math.inf)
    outliers = {}
    for number in once:
        residual, deviation = leave_one_out[number]
        would_be_fastest = measured.log_seconds[number] - residual < fastest
        if residual > (DECISIVE_DEVIATIONS if would_be_fastest else OUTLIER_DEVIATIONS) * deviation:
            outliers[number] = residual / deviation
    return max(outliers, key=outliers.__getitem__, default=None)


def _contender(measured: Measurements, improvement_N: Vector) -> int | None:
    """Return the fastest candidate or the measured one that is most likely to be faster: that with fewer runs.

    None if neither is free: one that is being measured, or of which a run failed, is not measured again.
    """
    free = measured.fitting - measured.running - measured.with_failed_run
    others = sorted(measured.fitting - {measured.incumbent}, key=lambda number: -improvement_N[number])
    pair = [number for number in (measured.incumbent, *others[:1]) if number in free]
    return min(pair, key=lambda number: len(measured.counting_runs[number]), default=None)


def _rivals(candidates: Sequence[Candidate], measured: Measurements, whole_front: bool) -> list[Rivals]:
    """Return for each candidate the measured ones to beat: those that fit and, for the front, have no higher peak."""
    fitting = tuple(measured.fitting)
    if not whole_front:
        return [fitting] * len(candidates)
    peaks = {number: measured.peak_bytes.get(number, candidates[number].predicted_bytes or 0) for number in fitting}
    return [
        fitting
        if one.predicted_bytes is None
        else tuple(n for n in fitting if n == number or peaks[n] <= one.predicted_bytes)
        for number, one in enumerate(candidates)
    ]


def _expected_improvement(measured: Measurements, rivals: Sequence[Rivals], posterior: GaussianMixture) -> Vector:
    """Return the expected improvement of each in log seconds (Jones, Schonlau and Welch 1998, equation 15)."""
    to_beat = {others: min(map(measured.log_seconds.__getitem__, others), default=np.inf) for others in set(rivals)}
    to_beat_N = np.array([to_beat[others] for others in rivals])
    known = np.isfinite(to_beat_N)
    improvement_N = np.where(known, 0.0, np.inf)
    for weight, component in zip(posterior.weights, posterior.components, strict=True):
        deviation_N = np.maximum(component.deviation_N, 1e-9)[known]
        difference_N = (to_beat_N - component.mean_N)[known]
        scaled_N = difference_N / deviation_N
        density_N = np.exp(-0.5 * scaled_N**2) / np.sqrt(2 * np.pi)
        improvement_N[known] += weight * (difference_N * ndtr(scaled_N) + deviation_N * density_N)
    return improvement_N


def _improvements(
    posterior: GaussianMixture, measured: Measurements, rivals: Sequence[Rivals], remaining: frozenset[int]
) -> tuple[float | None, float | None]:
    """Return two bounds on how much faster a candidate may be, as fractions with CONFIDENCE; None if not known.

    The first is by how much the fastest of `remaining` beats the fastest measured one. The second is by how much the
    fastest of all beats the incumbent: the fastest measured one, whose own time is uncertain as well. Neither is known
    if one of `remaining` has no rival: nothing measured is like it or fits.
    """
    if not measured.fitting or any(not rivals[number] for number in remaining):
        return None, None
    groups = grouped((rivals[number], number) for number in remaining | measured.fitting)
    incumbents = {others: min(others, key=measured.log_seconds.__getitem__) for others in groups}
    of_remaining, of_all = list[Vector](), list[Vector]()
    for component, num_samples in posterior.counts(NUM_SAMPLES):
        possible = set(measured.fitting)
        for others, group in groups.items():
            may_be_faster = component.may_be_below(incumbents[others])
            possible.update(number for number in group if may_be_faster[number])
        numbers = sorted(possible)
        samples_SI = component.samples(numbers, num_samples)
        gains, gains_of_all = [np.zeros(num_samples)], list[Vector]()
        for others, group in groups.items():
            left = [number for number in group if number in possible and number in remaining]
            fastest_of_left_S = samples_SI[:, np.searchsorted(numbers, left)].min(axis=1, initial=np.inf)
            to_beat_SI = samples_SI[:, np.searchsorted(numbers, others)]
            gains.append(to_beat_SI.min(axis=1) - fastest_of_left_S)
            own = [number for number in group if number in measured.fitting]
            fastest_S = samples_SI[:, np.searchsorted(numbers, own)].min(axis=1, initial=np.inf)
            to_beat_S = samples_SI[:, np.searchsorted(numbers, incumbents[others])]
            gains_of_all.append(to_beat_S - np.minimum(fastest_S, fastest_of_left_S))
        of_remaining.append(np.max(gains, axis=0))
        of_all.append(np.max(gains_of_all, axis=0))
    first, second = (quantile(np.concatenate(samples), SHARE_OF_SAMPLES) for samples in (of_remaining, of_all))
    return first, second


def quantile(gains_S: Vector, share: float) -> float:
    """Return a quantile of differences in log seconds as a fraction of time; at least 0."""
    return float(max(0.0, -np.expm1(-np.quantile(gains_S, share))))


def _choose(
    improvement_N: Vector,
    probability_N: Vector,
    mean_N: Vector,
    possible: frozenset[int],
    taken: frozenset[int],
    rules: Rules,
    *,
    is_open: bool,
) -> int | None:
    """Return the best possible candidate until `gap` is reached, then one whose improvement is worth its risk.

    The improvement of one that is not feasible counts as little as it is likely to fit.
    """
    free = [number for number in range(len(improvement_N)) if number not in taken]
    left = [number for number in free if number in possible]
    if is_open and left:
        chance_N = np.minimum(1.0, probability_N / rules.fit_confidence)
        return max(left, key=lambda n: (improvement_N[n] * chance_N[n], chance_N[n], -mean_N[n]))
    risky = [number for number in free if 0 < probability_N[number] < rules.fit_confidence]
    worth = [number for number in risky if probability_N[number] * improvement_N[number] > rules.gap]
    # Of about the same probability the one that improves most.
    return max(worth, key=lambda n: (round(float(probability_N[n]), 1), improvement_N[n]), default=None)


def _is_held_back(wanted: int | None, feasible: frozenset[int], running: frozenset[int], probability_N: Vector) -> bool:
    """Return whether a candidate that may not fit has to wait for other trials."""
    if wanted is None or wanted in feasible:
        return False
    return float(np.sum(1 - probability_N[[*running, wanted]])) > MOST_UNFIT
