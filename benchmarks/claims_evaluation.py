"""The metrics of runs, their comparison with a baseline, and the verdict on a claimed range."""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome

Row = Mapping[str, Any]
"""A row of findings.json: a run, or a planned configuration."""
NUMBER = r"(-?\d+(?:\.\d+)?)"
RANGES: dict[str, Callable[..., tuple[float, float]]] = {
    rf"{NUMBER} ± {NUMBER}": lambda value, tolerance: (value - tolerance, value + tolerance),
    rf"{NUMBER} to {NUMBER}": lambda low, high: (low, high),
    rf"at most {NUMBER}": lambda high: (-math.inf, high),
    rf"at least {NUMBER}": lambda low: (low, math.inf),
    NUMBER: lambda value: (value, value),
}
"""How a claimed range is written, and its ends, both included."""
SMALLEST = 0.001
"""Numbers closer to zero are written as this bound."""


class NotMeasuredError(Exception):
    """A run lacks what a check needs; the message says why."""


def run_metric(row: Row, metric: str) -> Any:
    """Return one of METRICS of a run that completed; raise NotMeasuredError if it has none."""
    if not outcome_of(row).completed:
        raise NotMeasuredError(outcome_of(row).value)
    try:
        return METRICS[metric](row["metrics"], np.array([step["loss"] for step in row["result"]["steps"]]))
    except KeyError as error:
        raise NotMeasuredError(f"no {error.args[0]}") from error


METRICS: dict[str, Callable[[Mapping[str, float], Any], Any]] = {
    **{
        name: lambda metrics, losses, name=name: metrics[name]  # type: ignore[misc]
        for name in ("final_loss", "peak_allocated_mib", "samples_per_second", "seconds_per_step")
    },
    "seconds_per_sample": lambda m, losses: 1 / m["samples_per_second"],
    "losses": lambda m, losses: losses,
    # The standard deviation of the losses themselves would mostly show the decrease of the loss.
    "loss_change_std": lambda m, losses: np.diff(losses).std(),
    "parameters_mib": lambda m, losses: m["allocated_after_load_mib"],
    "optimizer_state_mib": lambda m, losses: m["allocated_after_optimizer_1_mib"] - m["allocated_after_load_mib"],
    "gradients_mib": lambda m, losses: m["allocated_after_backward_2_mib"] - m["allocated_after_optimizer_2_mib"],
    "activations_mib": lambda m, losses: m["allocated_after_forward_2_mib"] - m["allocated_after_optimizer_1_mib"],
}
"""By name, the function of a run's summary metrics and of its losses, step by step."""


def _over_baseline(rows: Sequence[Row], metric: str) -> Any:
    variant, baseline = (run_metric(row, metric) for row in rows)
    return variant / baseline


def _added_percent_of_gradients(rows: Sequence[Row], metric: str) -> float:
    variant, baseline = (run_metric(row, metric) for row in rows)
    return float(100 * (variant - baseline) / run_metric(rows[1], "gradients_mib"))


def _linear_fit_error_percent(rows: Sequence[Row], metric: str) -> float:
    """Return the largest error of `metric = accumulation_steps x a + b`, fitted to the runs."""
    passes = [float(row["params"]["accumulation_steps"]) for row in rows]
    values = np.array([run_metric(row, metric) for row in rows])
    return float(100 * np.max(np.abs(np.polyval(np.polyfit(passes, values, 1), passes) / values - 1)))


def _fits(row: Row) -> bool:
    if outcome_of(row) not in (Outcome.OK, Outcome.OVER_BUDGET, Outcome.OUT_OF_MEMORY):
        raise NotMeasuredError(outcome_of(row).value)
    return outcome_of(row) is Outcome.OK


COMPARISONS: dict[str, tuple[str, Callable[[Sequence[Row], Any], float]]] = {
    "gigabytes": ("{gigabyte_unit}", lambda rows, metric: run_metric(rows[0], metric)),
    "ratio": ("x", _over_baseline),
    "saved_percent": ("%", lambda rows, metric: 100 * (1 - _over_baseline(rows, metric))),
    "added_percent": ("%", lambda rows, metric: 100 * (_over_baseline(rows, metric) - 1)),
    "difference_percent": ("%", lambda rows, metric: float(np.max(100 * np.abs(_over_baseline(rows, metric) - 1)))),
    "added_percent_of_gradients": ("%", _added_percent_of_gradients),
    "linear_fit_error_percent": ("%", _linear_fit_error_percent),
    "largest_that_fits": (
        "sequences",
        lambda rows, _: max((float(row["params"]["micro_batch_size"]) for row in rows if _fits(row)), default=0.0),
    ),
    "completed_percent": ("%", lambda rows, _: 100.0 if _fits(rows[0]) else 0.0),
}
"""By name, the unit, and the function of the runs (the baseline last) and of the metric."""
WITHOUT_METRIC = ("largest_that_fits", "completed_percent")


def verdict(claimed: str, samples: Sequence[float], reasons: Sequence[str] = ()) -> str:
    """Return whether the median is within the claimed range, and how many samples say otherwise."""
    if not samples:
        return f"not measured: {', '.join(sorted(set(reasons)))}"
    low, high = range_of(claimed)
    holds = low <= statistics.median(samples) <= high
    contrary = sum((low <= sample <= high) != holds for sample in samples)
    doubt = f", though {contrary} of {len(samples)} runs say otherwise" if contrary else ""
    return f"{'holds' if holds else 'does not hold'}{doubt}"


def summarize(table: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each claim and metric, over all of its conditions."""
    return pd.DataFrame([_summary(lines) for _, lines in table.groupby(["claim", "what"], sort=False)])


def _summary(lines: pd.DataFrame) -> dict[str, Any]:
    first, measured, missing = lines.iloc[0], lines[lines.runs > 0], lines[lines.runs == 0]
    held = measured[measured.verdict.str.startswith("holds")]
    claimed = f"{'; '.join(dict.fromkeys(lines.claimed))} {first.unit}"
    found = f"{spread(measured['median'])} {first.unit}" if len(measured) else ""
    if not len(measured):
        words = first.verdict
    elif len(held) == len(measured):
        words = "holds"
    elif not len(held):
        words = f"does not hold: measured {found} against {claimed}"
    else:
        words = f"holds only in {len(held)} of {len(measured)} conditions ({'; '.join(held.condition)})"
    if len(measured) and len(missing):
        words += f"; {len(missing)} of {len(lines)} conditions {missing.iloc[0].verdict}"
    conditions = len(lines)
    return {
        **first[["claim", "what"]],
        "conditions": conditions,
        "claimed": claimed,
        "measured": found,
        "verdict": words,
    }


def range_of(claimed: str) -> tuple[float, float]:
    """Return the ends of a claimed range; raise InvalidInputError if its form is invalid."""
    for pattern, ends in RANGES.items():
        if found := re.fullmatch(pattern, claimed):
            return ends(*map(float, found.groups()))
    forms = "'50 ± 5', '65 to 80', 'at most 1', 'at least 5' or one number"
    raise InvalidInputError(f"a claimed range must be written as {forms}, and is {claimed!r}; correct it")


def spread(values: Sequence[float]) -> str:
    """Return the least and the greatest of some values."""
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def number(value: float) -> str:
    """Return a number with three digits, or all those before the point."""
    if 0 < abs(value) < SMALLEST:
        return f"below {SMALLEST:g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def outcome_of(row: Row) -> Outcome:
    """Return how a run ended; raise NotMeasuredError if it was skipped."""
    if row["result"] is None:
        raise NotMeasuredError(row["skipped"])
    return Outcome(row["result"]["outcome"])
