"""What a study stores of a trial that was measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from pipeline.base.results import Outcome, Result
from pipeline.searching.judge import CONSTRAINT, LOWER_BOUND, OUTCOME, Verdict

DETAIL, METRICS = "detail", "metrics"
"""User attributes of a trial: why it did not complete, and its summary metrics."""
REPEAT = "is_repeat"
"""User attribute of a trial that was queued: how many other trials its configuration may have."""
COMPARED_METRICS = ("peak_allocated_mib", "peak_reserved_mib", "seconds_per_step", "common_steps_loss")
"""Metrics that are attributes of their own, since Optuna's dashboard plots only attributes that are numbers."""
MOST_INTERMEDIATE_VALUES = 8
"""Optimizer steps of a trial whose speed is stored, at most: each takes about 16 ms in SQLite."""

Judged = tuple[Verdict, Result, Mapping[str, float]]
"""How a run is judged, its result, and its summary metrics."""


@dataclass(frozen=True)
class TrialRecord:
    """The state, values and attributes of a trial, as Optuna stores them."""

    state: TrialState
    values: list[float] | None
    """Tokens per second and, as a second objective, the peak in bytes; None if it did not complete."""
    attributes: Mapping[str, Any]
    """User attributes; a trial that lacks the last, OUTCOME, was not stored whole."""
    constraints: Mapping[str, float]
    intermediate_values: Mapping[int, float]
    """Tokens per second by optimizer step; none of two objectives, of which Optuna takes no intermediate values."""

    @classmethod
    def of(cls, judged: Judged, num_objectives: int) -> "TrialRecord":
        """Return the record of a run in a study of so many objectives."""
        verdict, result, metrics = judged
        completed = verdict.state is TrialState.COMPLETE
        values = [float(value) for value in (verdict.tokens_per_second, verdict.peak_bytes) if value is not None]
        chosen = result.steps[:: len(result.steps) // MOST_INTERMEDIATE_VALUES + 1]
        speeds = {record.step: (record.tokens or record.positions) / record.seconds for record in chosen}
        constraints = {} if verdict.violation_bytes is None else {CONSTRAINT: verdict.violation_bytes}
        return cls(
            state=verdict.state,
            values=values[:num_objectives] if completed else None,
            attributes={
                METRICS: dict(metrics),
                **{name: metrics[name] for name in COMPARED_METRICS if name in metrics},
                DETAIL: result.detail,
                LOWER_BOUND: verdict.is_lower_bound,
                **constraints,  # for optuna-dashboard, which shows no constraints
                OUTCOME: result.outcome.value,
            },
            constraints=constraints,
            intermediate_values=speeds if completed and num_objectives == 1 else {},
        )


def is_known(trial: FrozenTrial) -> bool:
    """Whether a trial ended without being interrupted; a study of an earlier version has no METRICS."""
    outcome = Outcome(trial.user_attrs.get(OUTCOME, Outcome.INTERRUPTED))
    is_whole = METRICS in trial.user_attrs and outcome is not Outcome.INTERRUPTED
    is_closed_by_another = outcome.completed and trial.state is TrialState.FAIL
    return trial.state.is_finished() and is_whole and not is_closed_by_another
