"""Converts the result of a run to the state, value and constraint of its Optuna trial."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from optuna.trial import TrialState

from pipeline.base.results import Outcome, Result
from pipeline.base.units import MIB
from pipeline.training.metrics import limited_peak_mib, speed_in

CONSTRAINT = "bytes_over_budget"
"""Name of the constraint: bytes by which a trial exceeded its budget, at most zero within it."""
OUTCOME = "outcome"
"""Attribute of a trial: how its run ended."""
LOWER_BOUND = "is_lower_bound"
"""Attribute of a trial: whether its constraint is a lower bound, because it ran out of memory before its peak."""
UNIT_BYTES = {"bytes": 1, "MiB": 2**20, "GiB": 2**30}
ATTEMPT = re.compile(rf"[Tt]ried to allocate (?P<number>[\d.]+) (?P<unit>{'|'.join(UNIT_BYTES)})")


@dataclass(frozen=True)
class Verdict:
    """The state, value and constraint with which a trial is stored."""

    state: TrialState
    tokens_per_second: float | None
    peak_bytes: int | None
    violation_bytes: float | None
    """Bytes over the budget, negative within it; None if the run failed for another reason than memory."""
    is_lower_bound: bool
    """Whether the violation is a lower bound: the trial ran out of memory before its peak."""


def judge(result: Result, metrics: Mapping[str, float], budget_bytes: int) -> Verdict:
    """Return the verdict on a run; its peak is the reserved bytes on CUDA and the allocated ones on a CPU.

    Out-of-memory is PRUNED with a constraint in bytes, because TPE learns from pruned trials and not from failed ones.
    """
    peak = peak_bytes(metrics)
    if result.outcome.completed and peak is not None:
        return Verdict(TrialState.COMPLETE, speed_in(metrics), peak, float(peak - budget_bytes), False)
    if result.outcome is Outcome.OUT_OF_MEMORY:
        attempted = attempted_bytes(result.detail or "")
        return Verdict(TrialState.PRUNED, None, peak, float(max(1, (peak or 0) + attempted - budget_bytes)), True)
    return Verdict(TrialState.FAIL, None, peak, None, False)


def peak_bytes(metrics: Mapping[str, float]) -> int | None:
    """Return the peak that the budget limits."""
    peak = limited_peak_mib(metrics)
    return None if peak is None else round(peak * MIB)


def attempted_bytes(text: str) -> int:
    """Return the size of the allocation that an out-of-memory message names, 0 if it names none."""
    match = ATTEMPT.search(text)
    return int(float(match["number"]) * UNIT_BYTES[match["unit"]]) if match else 0
