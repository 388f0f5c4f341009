"""The metrics of a job's answer, which its run in MLflow has, so that jobs compare in the table of runs."""

from collections.abc import Iterable, Mapping

from pipeline.base.results import Outcome
from pipeline.base.units import MIB
from pipeline.prediction.explanation import Explanation
from pipeline.prediction.longest import LongestFindings
from pipeline.prediction.plan import PlanFindings
from pipeline.prediction.simulation import Simulation
from pipeline.report.comparison import ComparisonFindings
from pipeline.report.findings import Findings
from pipeline.report.simulations import SimulationComparison
from pipeline.searching.results import SearchFindings
from pipeline.training.metrics import Row
from pipeline.training.time_differences import time_change

OF_THE_BEST = (
    "peak_allocated_mib",
    "peak_reserved_mib",
    "peak_device_mib",
    "seconds_per_step",
    "tokens_per_second",
    "samples_per_second",
    "mean_loss",
    "final_loss",
    "eval_loss",
)
"""Metrics of the fastest run that are part of the answer."""


def answer_metrics(findings: Findings) -> dict[str, float]:
    """Return the metrics of the answer: those of the fastest run that completed, as `best_` and the metric's name.

    Beside them are the largest saving of memory and the largest speedup that is beyond noise.

    Of a search they are those of the fastest configuration that fits, with the bound of its certificate and its speed
    as a multiple of the baseline's; of a plan, the predictions for the one recommended on the first card, or the
    longest sequences there.
    """
    if isinstance(findings, SearchFindings):
        return _of_search(findings)
    if isinstance(findings, PlanFindings):
        return _of_plan(findings)
    if isinstance(findings, LongestFindings):
        best = findings.cards[0].longest
        return {} if best is None or best.sequence_length is None else {"best_sequence_length": best.sequence_length}
    if isinstance(findings, Simulation):
        return _of_simulation(findings)
    if isinstance(findings, Explanation):
        return _of_simulation(findings.simulation)
    if isinstance(findings, SimulationComparison):
        return {}
    return _of_rows(findings.rows if isinstance(findings, ComparisonFindings) else [findings.row])


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
        **({} if speedup is None else {"best_speedup": speedup}),
    }


def _of_plan(findings: PlanFindings) -> dict[str, float]:
    row = findings.recommended
    num_fitting = {"num_configurations_that_fit": float(sum(one.fits for one in findings.cards[0].rows))}
    if row is None:
        return num_fitting
    return num_fitting | {
        "best_predicted_peak_mib": row.peak_bytes / MIB,
        "best_predicted_tokens_per_second": row.tokens_per_second,
    }


def _of_rows(rows: Iterable[Row]) -> dict[str, float]:
    completed = [row for row in rows if row.completed]
    within = [row for row in completed if row.outcome is Outcome.OK]
    fastest = max(within or completed, key=lambda row: row.metrics.get("tokens_per_second", 0.0), default=None)
    metrics = {} if fastest is None else _of_best(fastest.metrics)
    savings = [row.metrics["memory_saving_percent"] for row in completed if "memory_saving_percent" in row.metrics]
    changes = [change for change in map(time_change, completed) if change is not None and change.is_beyond_noise]
    return {
        **metrics,
        **({"largest_memory_saving_percent": max(savings)} if savings else {}),
        **({"largest_speedup": max(change.speedup for change in changes)} if changes else {}),
    }


def _of_best(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"best_{name}": metrics[name] for name in OF_THE_BEST if name in metrics}
