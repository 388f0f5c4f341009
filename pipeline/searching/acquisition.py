"""Which configuration to measure next, and how much faster than the best one an unmeasured one can still be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from pipeline.searching import memory_model, time_model
from pipeline.searching.candidates import Candidate
from pipeline.searching.gaussian import Mixture, Vector

NUM_WORLDS = 2000
"""Possible worlds that are drawn for a bound."""
CONFIDENCE = 0.95
"""Share of them in which the bound must hold."""
MODEL_LIMIT = 0.1
"""What the law of time may leave over, root mean square and as a share, before it is not believed any more."""
PROBES = 4
"""Measurements before the law is judged."""
DOUBT = 2.0
"""Standard deviations by which a time may be longer than all others let expect, before it is measured again."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a search wants."""

    budget_bytes: int
    fit_confidence: float = 0.95
    """Probability of fitting that a configuration needs to be tried without further reason."""
    gap: float = 0.01
    """Share of its time that the answer may be slower than the best configuration."""
    kind: str = "cpu"
    """Of device: cpu or cuda."""
    whole_front: bool = False
    """Whether the front of memory and throughput is sought, and not its fastest end alone."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What has been measured, by number of candidate."""

    log_seconds: Mapping[int, float]
    """Logarithm of the seconds per token of those that ran to their end."""
    peak_bytes: Mapping[int, float]
    """Peaks; of those that ran out of memory, what they had reached and asked for."""
    over_budget: frozenset[int]
    failed: frozenset[int]
    """Neither time nor memory is known."""
    running: frozenset[int]
    again: frozenset[int] = frozenset()
    """Those measured a second time, or being so."""

    @property
    def taken(self) -> frozenset[int]:
        """Return those that must not be proposed."""
        return frozenset(self.log_seconds) | self.over_budget | self.failed | self.running


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What the candidates promise, given what has been measured."""

    next: int | None
    """Number of the candidate to measure next; None where none is worth it."""
    bound: float | None
    """Share of its time by which the best of all may beat the answer, with CONFIDENCE; None where there is none."""
    left: float | None
    """Share by which the best unmeasured one may beat the best measured one, likewise: what measuring on may bring."""
    eligible: frozenset[int]
    """Numbers of those that fit with the confidence asked for."""
    predicted_seconds: Vector | None
    """Of an optimizer step of each, as predicted now; None before anything was measured."""
    best_left: int | None
    """Number of the one to measure where one must be: `next`, else the best of those that fit."""
    law_is_off: float
    """What the law of time leaves over, root mean square and as a share."""
    doubtful: int | None
    """Number of a measured candidate to measure again, since it was slower than all others let expect; None if none.

    Another load on the machine slows what is measured, and nothing makes it faster.
    """

    @property
    def holds(self) -> bool:
        """Whether the law of time describes what was measured."""
        return self.law_is_off <= MODEL_LIMIT


def look_ahead(candidates: Sequence[Candidate], measured: Measured, rules: Rules) -> Outlook:
    """Return what to measure next, and the bound that holds if nothing more is measured."""
    probability_N = memory_model.probability_of_fit(candidates, measured.peak_bytes, rules.budget_bytes, rules.kind)
    eligible = frozenset(np.flatnonzero(probability_N >= rules.fit_confidence).tolist())
    time = time_model.fit(candidates, measured.log_seconds, rules.kind)
    mean_N = time.belief.mean_N
    belief = time.belief.given({number: float(mean_N[number]) for number in measured.running})
    rivals = _rivals(candidates, measured, rules.whole_front)
    gain_N = _expected_gain(measured, rivals, belief)
    open_to_all = eligible - measured.taken
    left, bound = _bounds(belief, measured, rivals, open_to_all)
    tokens_N = np.array([candidate.num_tokens for candidate in candidates])
    is_open = left is None or left > rules.gap or len(measured.log_seconds) < PROBES
    wanted = _choose(gain_N, probability_N, mean_N, measured.taken, rules, is_open=is_open)
    return Outlook(
        next=wanted,
        best_left=max(open_to_all, key=lambda number: float(gain_N[number]), default=None)
        if wanted is None
        else wanted,
        bound=bound,
        left=left,
        eligible=eligible,
        predicted_seconds=np.exp(mean_N) * tokens_N if measured.log_seconds else None,
        law_is_off=time.off if len(measured.log_seconds) >= PROBES else 0.0,
        doubtful=_doubtful(measured, time.surprises),
    )


def _doubtful(measured: Measured, surprises: Mapping[int, float]) -> int | None:
    """Return what was slower by more than DOUBT than the others let expect, the most surprising first."""
    if len(measured.log_seconds) < PROBES:
        return None
    once = surprises.keys() - measured.again - measured.running - measured.over_budget
    doubted = [number for number in once if surprises[number] > DOUBT]
    return max(doubted, key=lambda number: surprises[number], default=None)


def _rivals(candidates: Sequence[Candidate], measured: Measured, whole_front: bool) -> list[list[int]]:
    """Return the measured ones that each has to beat: those that fit or, for the front, the leaner ones of them."""
    fitting = [number for number in measured.log_seconds if number not in measured.over_budget]
    if not whole_front:
        return [fitting] * len(candidates)
    peaks = {number: measured.peak_bytes.get(number, candidates[number].predicted_bytes or 0) for number in fitting}
    return [
        fitting
        if one.predicted_bytes is None
        else [n for n in fitting if n == number or peaks[n] <= one.predicted_bytes]
        for number, one in enumerate(candidates)
    ]


def _expected_gain(measured: Measured, rivals: Sequence[Sequence[int]], belief: Mixture) -> Vector:
    """Return the expected improvement of each in log seconds (Jones, Schonlau and Welch 1998, equation 15)."""
    to_beat_N = np.array([min((measured.log_seconds[other] for other in others), default=np.inf) for others in rivals])
    gain_N = np.where(np.isfinite(to_beat_N), 0.0, np.inf)
    known = np.isfinite(to_beat_N)
    for share, one in zip(belief.shares, belief.beliefs, strict=True):
        deviation_N = np.maximum(one.deviation_N, 1e-9)[known]
        ahead_N = (to_beat_N - one.mean_N)[known]
        scaled_N = ahead_N / deviation_N
        density_N = np.exp(-0.5 * scaled_N**2) / np.sqrt(2 * np.pi)
        gain_N[known] += share * (ahead_N * ndtr(scaled_N) + deviation_N * density_N)
    return gain_N


def _bounds(
    belief: Mixture, measured: Measured, rivals: Sequence[Sequence[int]], left: frozenset[int]
) -> tuple[float | None, float | None]:
    """Return two shares of time, each as it is at most in CONFIDENCE of the possible worlds; None where nothing fits.

    By how much the fastest of `left` beats the fastest that was measured, and by how much the fastest of all beats the
    answer: the one that was measured to be the fastest, whose own time is as uncertain as a measurement is noisy.
    """
    fitting = {number for number in measured.log_seconds if number not in measured.over_budget}
    if not fitting or any(not rivals[number] for number in left):
        return None, None
    numbers = sorted(left | fitting)
    worlds = dict(zip(numbers, belief.draws(numbers, NUM_WORLDS).T, strict=True))
    answers = {number: min(rivals[number], key=lambda other: measured.log_seconds[other]) for number in numbers}
    best = {tuple(others): np.min([worlds[n] for n in others], axis=0) for others in map(tuple, rivals) if others}
    of_left = [best[tuple(rivals[number])] - worlds[number] for number in left]
    of_all = [worlds[answers[number]] - worlds[number] for number in numbers]
    return _at_most(of_left), _at_most(of_all)


def _at_most(gains: Sequence[Vector]) -> float:
    """Return the share that the greatest of these gains in log seconds stays below in CONFIDENCE of the worlds."""
    if not gains:
        return 0.0
    return float(max(0.0, -np.expm1(-np.quantile(np.max(gains, axis=0), CONFIDENCE))))


def _choose(
    gain_N: Vector, probability_N: Vector, mean_N: Vector, taken: frozenset[int], rules: Rules, *, is_open: bool
) -> int | None:
    """Return the candidate that promises most: an eligible one while the bound is open, then one worth its risk."""
    free = [number for number in range(len(gain_N)) if number not in taken]
    safe = [number for number in free if probability_N[number] >= rules.fit_confidence]
    if is_open and safe:
        return max(safe, key=lambda number: (gain_N[number], -mean_N[number]))
    risky = [number for number in free if 0 < probability_N[number] < rules.fit_confidence]
    worth = [number for number in risky if probability_N[number] * gain_N[number] > rules.gap]
    return max(worth, key=lambda number: (probability_N[number], gain_N[number]), default=None)
