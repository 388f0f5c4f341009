"""Trials: the runs of a search, the speed of a configuration by all of its runs, and how both are called."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pipeline.base.results import Outcome
from pipeline.base.units import MIB, in_four_digits
from pipeline.config.given import written
from pipeline.config.settings import default_values
from pipeline.config.space import Choice
from pipeline.training.metrics import limited_peak_mib, speed_in
from pipeline.training.timing import is_slowed, mean_speed

Item = TypeVar("Item")

TRIAL, ANSWER, PLAIN = "trial", "answer", "plain"
"""What runs a configuration: a trial, or a verification, as the answer or as what the answer is compared with."""
TOKENS, SAMPLES = "tokens/s", "samples/s"
"""Units of speeds: of Fitproof's own training, and of commands, whose tokens are not counted."""
FEW_DIMENSIONS = 4
"""Dimensions that are all shown, whether or not their values differ."""
TOO_LARGE = (Outcome.OUT_OF_MEMORY, Outcome.OVER_BUDGET)
"""Outcomes of a configuration that does not fit."""
FAILED = (Outcome.CRASHED, Outcome.DIVERGED, Outcome.TIMED_OUT)
"""Outcomes that tell neither the memory nor the time of a configuration."""
ALWAYS = ("micro_batch_size", "sequence_length")
"""Dimensions that are shown even where they have their default."""


@dataclass(frozen=True)
class Proposal:
    """A configuration to measure."""

    choice: Choice
    predicted_seconds: float | None = None
    """Predicted seconds of an optimizer step; None before anything was measured, and for a repeated measurement."""
    is_repeat: bool = False
    """Whether it was measured before."""
    bound: float | None = None
    """The stated bound of the fraction by which the best configuration is faster than the best measured one so far."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a configuration: a trial of the study, or a run of a verification."""

    number: int
    """Of the trial in its study, or of the verification in its search, from 0 on."""
    source: str = TRIAL
    """TRIAL or, in a verification, what the run is there: ANSWER or PLAIN."""
    choice: Mapping[str, Any]
    """A value for each dimension, by its setting's dotted name."""
    outcome: str
    detail: str | None = None
    fits: bool
    metrics: Mapping[str, float]
    """Summary metrics, named as in MLflow."""

    @property
    def name(self) -> str:
        """How the name of its run begins: `trial 3` or `verification 2: answer`."""
        return run_name(self.number, self.source)

    @property
    def peak_bytes(self) -> int | None:
        """The peak that the budget limits."""
        return peak_bytes(self.metrics)

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput, of a command in samples per second; None if the run did not complete."""
        return speed_in(self.metrics) if Outcome(self.outcome).completed else None

    @property
    def speed_text(self) -> str:
        """Throughput as text; `no speed` if the run did not complete."""
        return "no speed" if self.tokens_per_second is None else speed_text(self.tokens_per_second, unit_of([self]))

    @property
    def predicted_mib(self) -> float | None:
        """The predicted peak that the budget limits; None if there is none."""
        return self.metrics.get("predicted_peak_reserved_mib", self.metrics.get("predicted_peak_allocated_mib"))

    @property
    def summary(self) -> str:
        """Outcome, peak and throughput as text."""
        if self.outcome == Outcome.CRASHED and self.detail:
            return f"{self.outcome}: {self.detail.splitlines()[-1]}"
        if self.tokens_per_second is None or self.peak_bytes is None:
            return self.outcome
        return f"{self.outcome}, {self.peak_bytes / MIB:,.1f} MiB, {self.speed_text}"


def run_name(number: int, source: str = TRIAL) -> str:
    """Return how the name of a run of a search begins."""
    if source == TRIAL:
        return f"trial {number + 1}"
    return f"verification{f' {number + 1}' if number else ''}: {source}"


def peak_bytes(metrics: Mapping[str, float]) -> int | None:
    """Return the peak that the budget limits."""
    peak = limited_peak_mib(metrics)
    return None if peak is None else round(peak * MIB)


def unit_of(rows: Iterable[Trial]) -> str:
    """Return the unit of the speeds of trials."""
    return SAMPLES if any("tokens_per_second" not in row.metrics and speed_in(row.metrics) for row in rows) else TOKENS


def speed_text(speed: float, unit: str) -> str:
    """Return a speed with its unit."""
    return f"{speed_number(speed, unit)} {unit}"


def speed_number(speed: float, unit: str) -> str:
    """Return a speed without its unit: whole tokens, and four digits of samples."""
    return f"{speed:,.0f}" if unit == TOKENS else in_four_digits(speed)


def label(choice: Mapping[str, Any]) -> str:
    """Return a configuration as text: `micro-batch 4, checkpointing none, precision bf16`.

    Of many dimensions, those that have the default of their setting are left out, except for ALWAYS.
    """
    shown = choice
    if len(choice) > FEW_DIMENSIONS:
        defaults = default_values()
        shown = {name: value for name, value in choice.items() if name in ALWAYS or value != defaults.get(name)}
    return (
        ", ".join(f"{heading(name)} {written(value) or 'none'}" for name, value in shown.items())
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
    return {name: heading(name) for name in values if len(values) <= FEW_DIMENSIONS or name in ALWAYS or is_shown[name]}


def heading(dimension: str) -> str:
    """Return the heading of a dimension's column."""
    return dimension.replace("micro_batch_size", "micro-batch")


def trials_in(runs: Iterable[Trial]) -> list[Trial]:
    """Return the trials of the study among the runs of a search; the others are of verifications."""
    return [run for run in runs if run.source == TRIAL]


def one_per_configuration(rows: Sequence[Trial]) -> list[Trial]:
    """Return one trial for each configuration: of two, the one that did not fit, else the faster one.

    It stands for its configuration in what has one line for each; the speed of a configuration is its speed_of().
    """
    counting: dict[tuple[Any, ...], Trial] = {}
    for row in sorted(rows, key=lambda row: (row.outcome not in TOO_LARGE, -(row.tokens_per_second or 0))):
        counting.setdefault(tuple(row.choice.values()), row)
    return sorted(counting.values(), key=lambda row: row.number)


def speeds(choice: Mapping[str, Any], runs: Iterable[Trial]) -> list[float]:
    """Return the tokens per second of each run of a configuration that completed."""
    return [one.tokens_per_second for one in runs if one.choice == choice and one.tokens_per_second]


def speed_of(choice: Mapping[str, Any], runs: Iterable[Trial]) -> float:
    """Return the speed of a configuration in tokens per second: the mean of its runs that count; 0 without any.

    It is the only speed of a configuration that is compared or shown; that of one run is called so.
    """
    return mean_speed(speeds(choice, runs))


def is_counted(one: Trial, runs: Sequence[Trial]) -> bool:
    """Return whether a run counts: it was not slowed, and no other one of its configuration did not fit."""
    others = (other.outcome for other in runs if other.choice == one.choice)
    if one.outcome not in TOO_LARGE and any(outcome in TOO_LARGE for outcome in others):
        return False
    return one.tokens_per_second is None or not is_slowed(one.tokens_per_second, speeds(one.choice, runs))


def refuted(runs: Iterable[Trial]) -> list[Mapping[str, Any]]:
    """Return the configurations that did not fit or did not complete when a verification trained them again."""
    return [one.choice for one in runs if one.source != TRIAL and one.outcome != Outcome.OK]


def standing(runs: Sequence[Trial]) -> list[Trial]:
    """Return one trial for each configuration that no verification refuted."""
    failed = refuted(runs)
    return [row for row in one_per_configuration(trials_in(runs)) if row.choice not in failed]


def best_trial(runs: Sequence[Trial]) -> Trial | None:
    """Return the trial that stands for the fastest configuration that fits, and that no verification refuted."""
    fitting = (row for row in standing(runs) if row.fits)
    return max(fitting, key=lambda row: speed_of(row.choice, runs), default=None)


def best_speed(runs: Sequence[Trial]) -> float | None:
    """Return the speed of that configuration in tokens per second; None if there is none."""
    best = best_trial(runs)
    return None if best is None else speed_of(best.choice, runs)


def pareto_front(runs: Sequence[Trial]) -> list[Trial]:
    """Return the measured configurations that are not dominated in memory and throughput, by ascending peak."""
    return front_of(measured(standing(runs)), lambda row: (row.peak_bytes or 0, -speed_of(row.choice, runs)))


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
