"""What a search found: its trials, the check of its answer, and all that its report needs."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pipeline.base.results import Outcome
from pipeline.base.units import MIB
from pipeline.config.settings import default_values, written
from pipeline.searching.certificate import Certificate
from pipeline.training.metrics import limited_peak_mib
from pipeline.training.timing import is_slowed, mean_speed

Item = TypeVar("Item")

FEW_DIMENSIONS = 4
"""Dimensions that are all shown, whether or not their values differ."""
TOO_LARGE = (Outcome.OUT_OF_MEMORY, Outcome.OVER_BUDGET)
"""Outcomes of a configuration that does not fit."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measured configuration."""

    number: int
    choice: Mapping[str, Any]
    """A value for each dimension, by its setting's dotted name."""
    outcome: str
    detail: str | None
    fits: bool
    peak_bytes: int | None
    """The peak that the budget limits."""
    metrics: Mapping[str, float]
    """Summary metrics, named as in MLflow."""

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput; None if the run did not complete."""
        return self.metrics.get("tokens_per_second") if self.outcome in ("ok", "over_budget") else None

    @property
    def predicted_mib(self) -> float | None:
        """The predicted peak that the budget limits; None if there is none."""
        return self.metrics.get("predicted_peak_reserved_mib", self.metrics.get("predicted_peak_allocated_mib"))

    @property
    def summary(self) -> str:
        """Outcome, peak and throughput as text."""
        if self.tokens_per_second is None or self.peak_bytes is None:
            return self.outcome
        return f"{self.outcome}, {self.peak_bytes / MIB:,.1f} MiB, {self.tokens_per_second:,.0f} tokens/s"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A run of a configuration in addition to its trials, such as one of the verification."""

    choice: Mapping[str, Any]
    outcome: str
    tokens_per_second: float | None
    """None if the run did not complete."""
    peak_bytes: float | None
    """The peak that the budget limits."""


def label(choice: Mapping[str, Any]) -> str:
    """Return a configuration as text: `micro-batch 4, checkpointing none, precision bf16`.

    Of many dimensions, those that have the default of their setting are left out, except for the micro-batch size.
    """
    shown = choice
    if len(choice) > FEW_DIMENSIONS:
        defaults = default_values()
        shown = {
            name: value for name, value in choice.items() if name == "micro_batch_size" or value != defaults.get(name)
        }
    return (
        ", ".join(f"{heading(name)} {written(value)}" for name, value in shown.items())
        or "all settings at their defaults"
    )


def columns(choices: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the heading of each dimension that a table of these configurations shows.

    Of many dimensions, those that have the default of their setting in all of them are left out.
    """
    values: dict[str, set[Any]] = {}
    for choice in choices:
        for name, value in choice.items():
            values.setdefault(name, set()).add(value)
    is_shown = {name: values[name] != {default_values().get(name)} for name in values}
    is_shown["micro_batch_size"] = True
    return {name: heading(name) for name in values if len(values) <= FEW_DIMENSIONS or is_shown[name]}


def heading(dimension: str) -> str:
    """Return the heading of a dimension's column."""
    return dimension.replace("micro_batch_size", "micro-batch")


def one_per_configuration(rows: Sequence[Trial]) -> list[Trial]:
    """Return one trial for each configuration: of two, the one that did not fit, else the faster one.

    It stands for its configuration in what has one line for each; the speed of a configuration is its speed_of().
    """
    counting: dict[tuple[Any, ...], Trial] = {}
    for row in sorted(rows, key=lambda row: (row.outcome not in TOO_LARGE, -(row.tokens_per_second or 0))):
        counting.setdefault(tuple(row.choice.values()), row)
    return sorted(counting.values(), key=lambda row: row.number)


def speeds(choice: Mapping[str, Any], rows: Sequence[Trial]) -> list[float]:
    """Return the tokens per second of each trial of a configuration that completed."""
    return [row.tokens_per_second for row in rows if row.choice == choice and row.tokens_per_second]


def speed_of(choice: Mapping[str, Any], rows: Sequence[Trial]) -> float:
    """Return the speed of a configuration by its trials that count, in tokens per second; 0 if none completed."""
    return mean_speed(speeds(choice, rows))


def is_counted(row: Trial, rows: Sequence[Trial]) -> bool:
    """Return whether a trial counts: it was not slowed, and no other one of its configuration did not fit."""
    if row.outcome not in TOO_LARGE and any(one.outcome in TOO_LARGE for one in rows if one.choice == row.choice):
        return False
    return row.tokens_per_second is None or not is_slowed(row.tokens_per_second, speeds(row.choice, rows))


def best_trial(rows: Sequence[Trial]) -> Trial | None:
    """Return the trial that stands for the fastest configuration that fits."""
    fitting = (row for row in one_per_configuration(rows) if row.fits)
    return max(fitting, key=lambda row: speed_of(row.choice, rows), default=None)


def pareto_front(rows: Sequence[Trial]) -> list[Trial]:
    """Return the measured configurations that are not dominated in memory and throughput, by ascending peak."""
    return front_of(
        measured(one_per_configuration(rows)), lambda row: (row.peak_bytes or 0, -speed_of(row.choice, rows))
    )


def front_of(items: Iterable[Item], cost: Callable[[Item], tuple[float, float]]) -> list[Item]:
    """Return the items than which none costs less memory and no more time, by ascending memory."""
    front, least_time = list[Item](), math.inf
    for (_, time), item in sorted(((cost(item), item) for item in items), key=lambda pair: pair[0]):
        if time < least_time:
            front.append(item)
            least_time = time
    return front


def measured(rows: Sequence[Trial]) -> list[Trial]:
    """Return the trials that completed."""
    return [row for row in rows if row.tokens_per_second is not None and row.peak_bytes is not None]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The answer trained again in a clean process within the budget, and compared with a plain configuration."""

    choice: Mapping[str, Any]
    plain: Mapping[str, Any] | None
    """The naive configuration that is the same training; None if there is no other configuration to compare with."""
    num_steps: int
    outcome: str
    metrics: Mapping[str, float]
    plain_outcome: str | None
    plain_metrics: Mapping[str, float]
    max_loss_difference: float | None
    """Greatest difference of the two losses in any optimizer step."""
    tolerance: float
    """Difference that the round-off of the two number formats may cause."""
    seconds_measured: float
    """Device time of all its runs, from the start of each process to its end."""
    measurements: tuple[Measurement, ...] = ()
    """All its runs: the answer, faster configurations that were refuted, and the plain one."""
    refuted: tuple[str, ...] = ()
    """Faster configurations that did not fit, did not complete or were slower when they were trained again."""
    was_slowed: bool = False
    """Whether this run of the answer was slowed, so that it does not count."""
    reserved_bytes: tuple[int, ...] = ()
    """What the caching allocator held after each optimizer step of the answer; empty on a CPU."""

    def is_contradicted(self, gap: float) -> bool:
        """Return whether a faster configuration failed, or the plain one was faster by more than the share `gap`."""
        failed = (one.outcome != Outcome.OK for one in self.measurements if one.choice != self.plain)
        return any(failed) or self._is_slower_than_plain(gap)

    def _is_slower_than_plain(self, gap: float) -> bool:
        speed, plain = (metrics.get("tokens_per_second") for metrics in (self.metrics, self.plain_metrics))
        is_ok = self.plain_outcome == Outcome.OK and self.outcome == Outcome.OK
        return is_ok and speed is not None and plain is not None and speed < (1 - gap) * plain

    @property
    def same_training(self) -> bool | None:
        """Whether the losses agree; None if they were not compared."""
        return None if self.max_loss_difference is None else self.max_loss_difference <= self.tolerance

    @property
    def verdict(self) -> str:
        """The result in one short sentence."""
        if self.same_training is None:
            return f"Trained again: {self.outcome}"
        verdict = "are" if self.same_training else "are NOT"
        return f"Trained again, its losses {verdict} those of plain training"

    @property
    def summary(self) -> str:
        """The result in one sentence, with its numbers."""
        speed, peak = self.metrics.get("tokens_per_second"), limited_peak_mib(self.metrics)
        text = f"Trained again for {self.num_steps} optimizer steps in a fresh process: {self.outcome}"
        text += f", {speed:,.0f} tokens/s" if speed else ""
        text += " (more than 40 % slower than its fastest run: not counted)" if self.was_slowed else ""
        text += f", {peak:,.1f} MiB" if peak else ""
        if self.plain is not None and self.max_loss_difference is not None:
            verdict = "the same training" if self.same_training else "NOT the same training"
            text += (
                f"; against {label(self.plain)} its losses differ by at most {self.max_loss_difference:.2g} "
                f"(tolerance {self.tolerance:.2g}): {verdict}"
            )
        text += "".join(f"; {refuted}" for refuted in self.refuted)
        return text


@dataclass(frozen=True, kw_only=True)
class SearchFindings:
    """The findings of a search, from which its report is made."""

    entry: str
    model: str
    effective_batch_size: int
    budget_bytes: int
    num_configurations: int
    """In the whole space."""
    naive: tuple[Mapping[str, Any], ...]
    """The answer's training by default values, the largest micro-batch first: what its speed is compared with."""
    shows_front: bool
    """Whether the answer names the Pareto front."""
    rows: tuple[Trial, ...]
    certificate: Certificate | None = None
    """None if the sampler states no bound."""
    verification: Verification | None = None
    """None if the answer was not trained again."""
    notes: tuple[str, ...] = ()
    """The automatic budget, and why values of the space were removed; a sentence each."""
    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall-clock time of the session so far by what it did, until the report was made."""
    interrupted: str | None = None
    """How far the search came, such as 3 of at most 16 trials, if it was interrupted."""

    @property
    def best(self) -> Trial | None:
        """Return the answer; None if there is none."""
        return answer_of(self.rows, self.verification)

    @property
    def naive_trial(self) -> Trial | None:
        """Return the trial of the first naive configuration that fits; None if none of them was measured to fit."""
        fitting = [row for row in one_per_configuration(self.rows) if row.fits]
        found = (row for choice in self.naive for row in fitting if row.choice == choice)
        return next(found, None)

    @property
    def speedup(self) -> float | None:
        """The answer's speed as a multiple of the naive configuration's; None if one of them is unknown."""
        best, naive = self.best, self.naive_trial
        if best is None or naive is None:
            return None
        return speed_of(best.choice, self.rows) / speed_of(naive.choice, self.rows)


def answer_of(trials: Sequence[Trial], verification: Verification | None) -> Trial | None:
    """Return the fastest trial that fits and was not refuted by the verification; None if there is none."""
    if verification is None:
        return best_trial(trials)
    verified = verification.choice if verification.outcome == "ok" else None
    return next((row for row in one_per_configuration(trials) if row.choice == verified), None)
