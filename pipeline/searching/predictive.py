"""Which configuration to measure next, and how much faster than the best one an unmeasured one can still be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from pipeline.searching import memory_model, time_model
from pipeline.searching.belief import Belief, Vector
from pipeline.searching.candidates import Candidate

NUM_WORLDS = 2000
"""Possible worlds that are drawn for a bound."""
CONFIDENCE = 0.95
"""Share of them in which the bound must hold."""
MODEL_LIMIT = 0.1
"""What the law of time may leave over, root mean square and as a share, before it is not believed any more."""
PROBES = 4
"""Measurements before the law is judged."""


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
    """Share of its time by which the best unmeasured one may beat the incumbent, with CONFIDENCE; None without one."""
    eligible: frozenset[int]
    """Numbers of those that fit with the confidence asked for."""
    predicted_seconds: Vector | None
    """Of an optimizer step of each, as predicted now; None before anything was measured."""
    best_left: int | None
    """Number of the one to measure where one must be: `next`, else the best of those that fit."""
    law_is_off: float
    """What the law of time leaves over, root mean square and as a share."""

    @property
    def holds(self) -> bool:
        """Whether the law of time describes what was measured."""
        return self.law_is_off <= MODEL_LIMIT


def look_ahead(candidates: Sequence[Candidate], measured: Measured, rules: Rules) -> Outlook:
    """Return what to measure next, and the bound that holds if nothing more is measured."""
    probability_N = memory_model.probability_of_fit(candidates, measured.peak_bytes, rules.budget_bytes, rules.kind)
    eligible = frozenset(np.flatnonzero(probability_N >= rules.fit_confidence).tolist())
    time = time_model.fit(candidates, measured.log_seconds)
    running = {number: float(time.belief.mean_N[number]) for number in measured.running}
    belief = time.belief.given(running, time_model.NOISE)
    to_beat_N = _to_beat(candidates, measured, rules.whole_front)
    gain_N = _expected_gain(to_beat_N, belief)
    bound = _bound(belief, to_beat_N, sorted(eligible - measured.taken))
    tokens_N = np.array([candidate.num_tokens for candidate in candidates])
    is_open = bound is None or bound > rules.gap or len(measured.log_seconds) < PROBES
    wanted = _choose(gain_N, probability_N, belief, measured.taken, rules, is_open=is_open)
    left = eligible - measured.taken
    return Outlook(
        next=wanted,
        best_left=max(left, key=lambda number: float(gain_N[number]), default=None) if wanted is None else wanted,
        bound=bound,
        eligible=eligible,
        predicted_seconds=np.exp(belief.mean_N) * tokens_N if measured.log_seconds else None,
        law_is_off=time.off if len(measured.log_seconds) >= PROBES else 0.0,
    )


def _to_beat(candidates: Sequence[Candidate], measured: Measured, whole_front: bool) -> Vector:
    """Return the log seconds that each has to beat: the incumbent's or, for the front, those of the leaner ones."""
    fitting = [number for number in measured.log_seconds if number not in measured.over_budget]
    best = np.full(len(candidates), np.inf)
    for number, candidate in enumerate(candidates):
        rivals = fitting
        if whole_front and candidate.predicted_bytes is not None:
            leaner = candidate.predicted_bytes
            rivals = [n for n in fitting if measured.peak_bytes.get(n, candidates[n].predicted_bytes or 0) <= leaner]
        best[number] = min((measured.log_seconds[other] for other in rivals), default=np.inf)
    return best


def _expected_gain(to_beat_N: Vector, belief: Belief) -> Vector:
    """Return the expected improvement of each in log seconds (Jones, Schonlau and Welch 1998, equation 15)."""
    deviation_N = np.maximum(belief.deviation_N, 1e-9)
    with np.errstate(invalid="ignore"):
        ahead_N = to_beat_N - belief.mean_N
        scaled_N = ahead_N / deviation_N
        density_N = np.exp(-0.5 * scaled_N**2) / np.sqrt(2 * np.pi)
        gain: Vector = np.where(np.isfinite(ahead_N), ahead_N * ndtr(scaled_N) + deviation_N * density_N, np.inf)
    return gain


def _bound(belief: Belief, to_beat_N: Vector, numbers: list[int]) -> float | None:
    """Return the share by which the fastest of `numbers` may beat what it has to, in CONFIDENCE of possible worlds."""
    if not numbers:
        return 0.0 if np.isfinite(to_beat_N).any() else None
    if not np.isfinite(to_beat_N[numbers]).all():
        return None
    ahead_D = (belief.of(numbers).draws(NUM_WORLDS) - to_beat_N[numbers]).min(axis=1)
    return float(max(0.0, -np.expm1(np.quantile(ahead_D, 1 - CONFIDENCE))))


def _choose(
    gain_N: Vector, probability_N: Vector, belief: Belief, taken: frozenset[int], rules: Rules, *, is_open: bool
) -> int | None:
    """Return the candidate that promises most: an eligible one while the bound is open, then one worth its risk."""
    free = [number for number in range(len(gain_N)) if number not in taken]
    safe = [number for number in free if probability_N[number] >= rules.fit_confidence]
    if is_open and safe:
        return max(safe, key=lambda number: (gain_N[number], -belief.mean_N[number]))
    risky = [number for number in free if 0 < probability_N[number] < rules.fit_confidence]
    worth = [number for number in risky if probability_N[number] * gain_N[number] > rules.gap]
    return max(worth, key=lambda number: (probability_N[number], gain_N[number]), default=None)
