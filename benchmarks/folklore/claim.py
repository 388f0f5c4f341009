"""What is claimed, and the runs that check it: the shapes in which the claims are written down."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from folklore.scale import Scale
from pipeline.base.results import Outcome

SMALLEST = 0.001
"""What is below this is not told apart from others."""


class NotMeasuredError(Exception):
    """A run has not the figure that is asked for; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run, as MLflow keeps it."""

    outcome: Outcome
    detail: str | None
    """Why it did not end well, in a few words."""
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    """Summary metrics by their names in MLflow."""
    losses: tuple[float, ...]
    """Of each optimizer step."""

    def figure(self, name: str) -> float:
        """Return a summary metric of a run that took all of its steps; raise NotMeasuredError where there is none."""
        if not self.outcome.completed:
            raise NotMeasuredError(self.outcome.value)
        if name not in self.metrics:
            raise NotMeasuredError(f"no {name}")
        return self.metrics[name]


@dataclass(frozen=True)
class Claimed:
    """The range within which a figure is what people say, both ends included."""

    low: float
    high: float
    words: str
    """The range as it is read, tolerance included."""

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def about(value: float, tolerance: float) -> Claimed:
    """Return the claim that a figure is `value`, which holds within `tolerance`."""
    return Claimed(value - tolerance, value + tolerance, f"{number(value)} ± {number(tolerance)}")


def between(low: float, high: float) -> Claimed:
    """Return the claim that a figure is from `low` to `high`."""
    return Claimed(low, high, f"{number(low)} to {number(high)}")


def at_most(value: float) -> Claimed:
    """Return the claim that a figure, which is never negative, is not above `value`."""
    return Claimed(0.0, value, f"at most {number(value)}")


def exactly(value: float) -> Claimed:
    """Return the claim that a figure is `value` and no other."""
    return Claimed(value, value, number(value))


def at_least(value: float) -> Claimed:
    """Return the claim that a figure is not below `value`."""
    return Claimed(value, math.inf, f"at least {number(value)}")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One figure under one condition: the runs it needs, how it follows from them, and what it is said to be."""

    what: str
    condition: str
    unit: str
    claimed: Claimed
    runs: tuple[Mapping[str, Any], ...]
    """Settings of each run, the baseline last."""
    figure: Callable[[Sequence[Record]], float]
    """The runs of one round, in the order of `runs` -> the figure; may raise NotMeasuredError."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What people say, and how it is checked."""

    name: str
    text: str
    checks: Callable[[Scale], Iterator[Check]]


def described(params: Mapping[str, Any]) -> str:
    """Return a run's main settings in a few words, all but its seed."""
    named = {name: params.get(name) for name in ("causal_lm.num_layers", "causal_lm.width", "budget")}
    more = [f"{name.rpartition('.')[2]} {value}" for name, value in named.items() if value not in (None, "none")]
    cut = f"{params['micro_batch_size']}x{params['accumulation_steps']}"
    words = [params["model"], cut, f"{params['sequence_length']} tokens", params["precision"]]
    return ", ".join([*words, f"checkpointing {params['checkpointing']}", *more])


def number(value: float) -> str:
    """Return a figure as it is read: three digits, whole where it is large, and only a bound where it is tiny."""
    if 0 < abs(value) < SMALLEST:
        return f"below {SMALLEST:g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
