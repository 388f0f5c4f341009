"""The shapes of benchmarks/claims.py: what is claimed, the runs that check it, what they found, and the verdict."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from folklore.scale import Scale
from pipeline.contracts import Outcome

SMALLEST = 0.001
"""What is below this is not told apart from others."""


class NotMeasuredError(Exception):
    """A run has not the figure that is asked for; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run, as MLflow keeps it."""

    outcome: Outcome
    params: Mapping[str, str]
    figures: Mapping[str, float]
    """Summary metrics by their names in MLflow."""
    losses: tuple[float, ...]
    """Of each optimizer step."""

    def figure(self, name: str) -> float:
        """Return a summary metric of a run that took all of its steps; raise NotMeasuredError where there is none."""
        if not self.outcome.completed:
            raise NotMeasuredError(self.outcome.value)
        if name not in self.figures:
            raise NotMeasuredError(f"no {name}")
        return self.figures[name]


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


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the runs of a check have shown."""

    check: Check
    samples: tuple[float, ...]
    """The figure of each round that has it."""
    reasons: tuple[str, ...]
    """Why other rounds have it not."""

    @property
    def median(self) -> float:
        """The median of the rounds; there must be one."""
        return statistics.median(self.samples)

    @property
    def holds(self) -> bool:
        """Whether the median is what was claimed."""
        return bool(self.samples) and self.median in self.check.claimed

    @property
    def verdict(self) -> str:
        """The verdict in words: the median decides, and rounds that say otherwise are mentioned."""
        if not self.samples:
            return f"not measured: {', '.join(sorted(set(self.reasons)))}"
        contrary = sum((sample in self.check.claimed) != self.holds for sample in self.samples)
        doubt = f", though {contrary} of {len(self.samples)} runs say otherwise" if contrary else ""
        return f"{'holds' if self.holds else 'does not hold'}{doubt}"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One figure of a claim under all of its conditions: a row of the table."""

    claim: Claim
    findings: tuple[Finding, ...]

    @property
    def what(self) -> str:
        """The figure's name."""
        return self.findings[0].check.what

    @property
    def unit(self) -> str:
        """The figure's unit."""
        return self.findings[0].check.unit

    @property
    def claimed(self) -> str:
        """What it is said to be, for each condition where that differs."""
        return f"{'; '.join(dict.fromkeys(finding.check.claimed.words for finding in self.findings))} {self.unit}"

    @property
    def measured(self) -> str:
        """The least and the greatest median of the conditions."""
        medians = [finding.median for finding in self.findings if finding.samples]
        if not medians:
            return ""
        return f"{spread(medians)} {self.unit}"

    @property
    def verdict(self) -> str:
        """The verdict over all conditions, in words."""
        measured = [finding for finding in self.findings if finding.samples]
        missing = [finding for finding in self.findings if not finding.samples]
        held = [finding.check.condition for finding in measured if finding.holds]
        without = f"; {len(missing)} of {len(self.findings)} conditions {missing[0].verdict}" if missing else ""
        if not measured:
            return missing[0].verdict
        if len(held) == len(measured):
            return f"holds{without}"
        if not held:
            return f"does not hold: measured {self.measured} against {self.claimed}{without}"
        return f"holds only in {len(held)} of {len(measured)} conditions ({'; '.join(held)}){without}"


def statements_of(claim: Claim, findings: Sequence[Finding]) -> list[Statement]:
    """Return a claim's findings, those of the same figure together."""
    ordered = sorted(findings, key=lambda finding: [f.check.what for f in findings].index(finding.check.what))
    groups = groupby(ordered, key=lambda finding: finding.check.what)
    return [Statement(claim=claim, findings=tuple(group)) for _, group in groups]


def find(check: Check, rounds: Sequence[Sequence[Record] | NotMeasuredError]) -> Finding:
    """Return what the rounds of a check show: each has the records of its runs, or the reason why it has none."""
    samples, reasons = [], []
    for records in rounds:
        try:
            if isinstance(records, NotMeasuredError):
                raise records
            samples.append(check.figure(records))
        except NotMeasuredError as reason:
            reasons.append(str(reason))
    return Finding(check=check, samples=tuple(samples), reasons=tuple(reasons))


def number(value: float) -> str:
    """Return a figure as it is read: three digits, whole where it is large, and only a bound where it is tiny."""
    if 0 < abs(value) < SMALLEST:
        return f"below {SMALLEST:g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Return the least and the greatest of some figures."""
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"
