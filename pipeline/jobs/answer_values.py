"""The metrics and settings of a job's answer, which its run in MLflow has, so that jobs compare in the list of runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.base.results import Outcome
from pipeline.base.units import MIB
from pipeline.planning.plan import PlanFindings
from pipeline.prediction.commands.explanation import Explanation
from pipeline.prediction.commands.simulation import Simulation
from pipeline.report.comparison import ComparisonFindings
from pipeline.report.findings import Findings
from pipeline.report.profile import ProfilingFindings
from pipeline.report.simulations import SimulationComparison
from pipeline.searching.results import SearchFindings
from pipeline.training.metrics import Row, common_settings, speed_in
from pipeline.training.time_differences import time_change

OF_THE_BEST = (
    "peak_allocated_mib",
    "peak_reserved_mib",
    "peak_device_mib",
    "memory_saving_percent",
    "seconds_per_step",
    "tokens_per_second",
    "samples_per_second",
    "mean_loss",
    "final_loss",
    "eval_loss",
    "prediction_error_percent",
)
"""Metrics of the fastest run that are part of the answer."""
ANSWER = "answer/"
"""What the names of the answer's settings begin with among the params of the job's run."""
ALWAYS = ("micro_batch_size",)
"""Settings of the answer that are there even if all variants have the same."""


def answer_metrics(findings: Findings) -> dict[str, float]:
    """Return the metrics of the answer: those of the fastest run that completed, by the names that the run has.

    Beside them are the largest saving of memory and the largest speedup that is beyond noise.

    Of a search they are those of the fastest configuration that fits, with the bound of its certificate and its speed
    as a multiple of the baseline's; of a plan, the predictions for the one recommended on the first card, with
    the longest sequences there where those are searched.
    """
    if isinstance(findings, SearchFindings):
        return _of_search(findings)
    if isinstance(findings, PlanFindings):
        return _of_plan(findings)
    if isinstance(findings, Simulation):
        return _of_simulation(findings)
    if isinstance(findings, Explanation):
        return _of_simulation(findings.simulation)
    if isinstance(findings, SimulationComparison):
        return {}
    return _of_rows(_rows(findings))


def answer_settings(findings: Findings) -> dict[str, Any]:
    """Return the settings of the answer by their names in the params of the job's run, as answer_metrics() chooses it.

    They are the dimensions of a search or a plan, and of a comparison the settings in which its variants differ.
    """
    chosen: Mapping[str, Any] = {}
    if isinstance(findings, SearchFindings):
        chosen = {} if findings.best is None else findings.best.choice
    elif isinstance(findings, PlanFindings):
        chosen = {} if findings.recommended is None else findings.recommended.choice
    elif isinstance(findings, ComparisonFindings | ProfilingFindings):
        rows = _rows(findings)
        fastest, common = _fastest(rows), common_settings([row.params for row in rows])
        chosen = {} if fastest is None else {k: v for k, v in fastest.params.items() if k in ALWAYS or k not in common}
    return {f"{ANSWER}{name}": value for name, value in chosen.items()}


def _rows(findings: ComparisonFindings | ProfilingFindings) -> Sequence[Row]:
    return findings.rows if isinstance(findings, ComparisonFindings) else (findings.row,)


def _fastest(rows: Sequence[Row]) -> Row | None:
    """Return the fastest run that completed within its budget, else that of all that completed; None without any."""
    completed = [row for row in rows if row.completed]
    within = [row for row in completed if row.outcome is Outcome.OK]
    return max(within or completed, key=lambda row: speed_in(row.metrics) or 0.0, default=None)


def _of_simulation(findings: Simulation) -> dict[str, float]:
    largest, smallest = findings.largest, findings.smallest_bytes
    if largest is None:
        return {}
    return {
        "peak_allocated_mib": largest.peak_allocated_bytes / MIB,
        "peak_reserved_mib": largest.peak_reserved_bytes / MIB,
        "peak_device_mib": largest.device_bytes / MIB,
        **({} if smallest is None else {"smallest_memory_mib": smallest / MIB}),
    }


def _of_search(findings: SearchFindings) -> dict[str, float]:
    best, certificate, speedup = findings.best, findings.certificate, findings.speedup
    if best is None:
        return {}
    bound = None if certificate is None else certificate.stated_bound
    return {
        **_of_best(best.metrics),
        **({} if bound is None else {"bound_percent": 100 * bound}),
        **({} if speedup is None else {"speedup": speedup}),
    }


def _of_plan(findings: PlanFindings) -> dict[str, float]:
    row = findings.recommended
    num_fitting = {"num_configurations_that_fit": float(sum(one.fits for one in findings.cards[0].rows))}
    if row is None:
        return num_fitting
    is_longest = findings.cards[0].lengths_up_to is not None
    longest = {"longest_sequence_length": row.choice["sequence_length"]} if is_longest else {}
    speed = {"predicted_tokens_per_second": row.tokens_per_second}
    return num_fitting | longest | {"predicted_peak_mib": row.peak_bytes / MIB} | speed


def _of_rows(rows: Sequence[Row]) -> dict[str, float]:
    completed, fastest = [row for row in rows if row.completed], _fastest(rows)
    metrics = {} if fastest is None else _of_best(fastest.metrics)
    savings = [row.metrics["memory_saving_percent"] for row in completed if "memory_saving_percent" in row.metrics]
    changes = [change for change in map(time_change, completed) if change is not None and change.is_beyond_noise]
    return {
        **metrics,
        **({"largest_memory_saving_percent": max(savings)} if savings else {}),
        **({"largest_speedup": max(change.speedup for change in changes)} if changes else {}),
    }


def _of_best(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in OF_THE_BEST if name in metrics}
