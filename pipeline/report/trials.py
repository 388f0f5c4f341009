"""The trials of a search: what each measured, the best of them, and those that no other beats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.contracts import Outcome
from pipeline.metrics import MIB

TOO_LARGE = (Outcome.OUT_OF_MEMORY, Outcome.OVER_BUDGET)
"""Outcomes of what does not fit."""


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One measured configuration."""

    number: int
    choice: Mapping[str, Any]
    """A value for each dimension, by its setting's dotted name."""
    outcome: str
    detail: str | None
    fits: bool
    peak_bytes: int | None
    """The peak that the budget limits."""
    figures: Mapping[str, float]
    """Summary metrics, named as in MLflow."""

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput, where it was measured to the end."""
        return self.figures.get("tokens_per_second") if self.outcome in ("ok", "over_budget") else None

    @property
    def in_words(self) -> str:
        """What the trial showed, in a few words."""
        if self.tokens_per_second is None or self.peak_bytes is None:
            return self.outcome
        return f"{self.outcome}, {self.peak_bytes / MIB:,.1f} MiB, {self.tokens_per_second:,.0f} tokens/s"


def in_words(choice: Mapping[str, Any]) -> str:
    """Return a configuration as people say it: `micro-batch 4, checkpointing none, precision bf16`."""
    return ", ".join(f"{heading(name)} {value}" for name, value in choice.items())


def heading(dimension: str) -> str:
    """Return a dimension's name as people say it."""
    return dimension.replace("micro_batch_size", "micro-batch")


def each_once(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the trial of each configuration that counts: of two the one that did not fit, or the faster one.

    A configuration is measured again where its first time is doubted, since another load may have slowed it.
    """
    counting: dict[tuple[Any, ...], TrialRow] = {}
    for row in sorted(rows, key=lambda row: (row.outcome not in TOO_LARGE, -(row.tokens_per_second or 0))):
        counting.setdefault(tuple(row.choice.values()), row)
    return sorted(counting.values(), key=lambda row: row.number)


def best_row(rows: Sequence[TrialRow]) -> TrialRow | None:
    """Return the fastest configuration that fits."""
    return max((row for row in each_once(rows) if row.fits), key=lambda row: row.tokens_per_second or 0, default=None)


def pareto_front(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the measured configurations that no other beats in both memory and throughput, the leanest first."""
    front: list[TrialRow] = []
    for row in sorted(measured(each_once(rows)), key=lambda row: (row.peak_bytes or 0, -(row.tokens_per_second or 0))):
        if not front or (row.tokens_per_second or 0) > (front[-1].tokens_per_second or 0):
            front.append(row)
    return front


def measured(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the trials that ran to their end."""
    return [row for row in rows if row.tokens_per_second is not None and row.peak_bytes is not None]
