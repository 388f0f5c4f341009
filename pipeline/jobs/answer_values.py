"""The metrics and settings of a job's answer, which its run in MLflow has, so that jobs compare in the list of runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.base.results import Outcome
from pipeline.base.units import MIB
from pipeline.planning.plan import PlanFindings
from pipeline.prediction.commands.explanation import Explanation
from pipeline.prediction.commands.simulation import Simulation
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


Answer = tuple[dict[str, float], Mapping[str, Any]]
"""The metrics of an answer and its settings; both are empty without one."""


def answer_of(findings: Findings) -> Answer:
    """Return the metrics of the answer, by the names that a run has, and its settings, by those of the job's params.

    It is the fastest run that completed; its settings are those in which the variants differ. Beside its metrics are
    the largest saving of memory and the largest speedup that is beyond noise.

    Of a search it is the fastest configuration that fits, with the bound of its certificate and its speed as a multiple
    of the baseline's; of a plan, the configuration recommended on the first card with its predictions, and the longest
    sequences there where those are searched. Their settings are the dimensions.
    """
    metrics, settings = _answer_of(findings)
    return metrics, {f"{ANSWER}{name}": value for name, value in settings.items()}


def _answer_of(findings: Findings) -> Answer:
    match findings:
        case SearchFindings():
            return _of_search(findings)
        case PlanFindings():
            return _of_plan(findings)
        case Simulation():
            return _of_simulation(findings)
        case Explanation():
            return _of_simulation(findings.simulation)
        case SimulationComparison():
            return {}, {}
        case ProfilingFindings():
            return _of_rows([findings.row])
    return _of_rows(findings.rows)


def _fastest(rows: Sequence[Row]) -> Row | None:
    """Return the fastest run that completed within its budget, else that of all that completed; None without any."""
    completed = [row for row in rows if row.completed]
    within = [row for row in completed if row.outcome is Outcome.OK]
    return max(within or completed, key=lambda row: speed_in(row.metrics) or 0.0, default=None)


def _of_simulation(findings: Simulation) -> Answer:
    largest, smallest = findings.largest, findings.smallest_bytes
    if largest is None:
        return {}, {}
    metrics = {
        "peak_allocated_mib": largest.peak_allocated_bytes / MIB,
        "peak_reserved_mib": largest.peak_reserved_bytes / MIB,
        "peak_device_mib": largest.device_bytes / MIB,
        **({} if smallest is None else {"smallest_memory_mib": smallest / MIB}),
    }
    return metrics, {}


def _of_search(findings: SearchFindings) -> Answer:
    best, certificate, speedup = findings.best, findings.certificate, findings.speedup
    if best is None:
        return {}, {}
    bound = None if certificate is None else certificate.stated_bound
    metrics = {
        **_of_best(best.metrics),
        **({} if bound is None else {"bound_percent": 100 * bound}),
        **({} if speedup is None else {"speedup": speedup}),
    }
    return metrics, best.choice


def _of_plan(findings: PlanFindings) -> Answer:
    row = findings.recommended
    num_fitting = {"num_configurations_that_fit": float(sum(one.fits for one in findings.cards[0].rows))}
    if row is None:
        return num_fitting, {}
    is_longest = findings.cards[0].lengths_up_to is not None
    longest = {"longest_sequence_length": row.choice["sequence_length"]} if is_longest else {}
    speed = {"predicted_tokens_per_second": row.tokens_per_second}
    return num_fitting | longest | {"predicted_peak_mib": row.peak_bytes / MIB} | speed, row.choice


def _of_rows(rows: Sequence[Row]) -> Answer:
    completed, fastest = [row for row in rows if row.completed], _fastest(rows)
    if fastest is None:
        return {}, {}
    common = common_settings([row.params for row in rows])
    settings = {name: value for name, value in fastest.params.items() if name in ALWAYS or name not in common}
    savings = [row.metrics["memory_saving_percent"] for row in completed if "memory_saving_percent" in row.metrics]
    changes = [change for change in map(time_change, completed) if change is not None and change.is_beyond_noise]
    metrics = {
        **_of_best(fastest.metrics),
        **({"largest_memory_saving_percent": max(savings)} if savings else {}),
        **({"largest_speedup": max(change.speedup for change in changes)} if changes else {}),
    }
    return metrics, settings


def _of_best(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in OF_THE_BEST if name in metrics}
