"""What the runs of a claim have shown, and the verdict in words, by rule."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from folklore.claim import Check, Claim, NotMeasuredError, Record, number


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


def spread(values: Sequence[float]) -> str:
    """Return the least and the greatest of some figures."""
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"
