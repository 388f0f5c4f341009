"""How the run of a trial is judged, and what the study stores of it."""

from collections.abc import Mapping

from optuna.trial import FrozenTrial, TrialState, create_trial

from pipeline.base.results import Outcome, Result
from pipeline.memory.out_of_memory import read_messages
from pipeline.searching.trials import peak_bytes
from pipeline.training.metrics import speed_in

CONSTRAINT = "bytes_over_budget"
"""Name of the constraint: bytes by which a trial exceeded its budget, at most zero within it."""
OUTCOME = "outcome"
"""Attribute of a trial: how its run ended."""
DETAIL, METRICS = "detail", "metrics"
"""User attributes of a trial: why it did not complete, and its summary metrics."""
NUM_EARLIER_RUNS = "is_repeat"
"""User attribute of a trial that was queued: how many other trials its configuration may have."""
COMPARED_METRICS = ("peak_allocated_mib", "peak_reserved_mib", "seconds_per_step", "common_steps_loss")
"""Metrics that are attributes of their own, since Optuna's dashboard plots only attributes that are numbers."""
MOST_INTERMEDIATE_VALUES = 8
"""Optimizer steps of a trial whose speed is stored, at most: each takes about 16 ms in SQLite."""


def is_known(trial: FrozenTrial) -> bool:
    """Whether a trial ended without being interrupted; a study of an earlier version has no METRICS."""
    outcome = Outcome(trial.user_attrs.get(OUTCOME, Outcome.INTERRUPTED))
    is_whole = METRICS in trial.user_attrs and outcome is not Outcome.INTERRUPTED
    is_closed_by_another = outcome.completed and trial.state is TrialState.FAIL
    return trial.state.is_finished() and is_whole and not is_closed_by_another


def judge(result: Result, metrics: Mapping[str, float], budget_bytes: int, num_objectives: int = 1) -> FrozenTrial:
    """Return a run as the trial of a study with so many objectives; what its budget limits is peak_bytes().

    Its values are tokens per second and, as a second objective, the peak in bytes; its constraint is the number of
    bytes over the budget, none if the run failed for another reason than memory. Its intermediate values, of which
    Optuna takes none of two objectives, are tokens per second by optimizer step. OUTCOME is its last attribute: a trial
    that lacks it was not stored whole.

    Out-of-memory is PRUNED with a constraint in bytes, because TPE learns from pruned trials and not from failed ones:
    a lower bound, as the run ended before its peak.
    """
    peak, speed = peak_bytes(metrics), speed_in(metrics)
    state, violation_bytes = TrialState.FAIL, None
    if result.outcome.completed and peak is not None:
        state, violation_bytes = TrialState.COMPLETE, float(peak - budget_bytes)
    elif result.outcome is Outcome.OUT_OF_MEMORY:
        attempted = next((one.asked_bytes or 0 for one in read_messages(result.detail or "").first), 0)
        state, violation_bytes = TrialState.PRUNED, float(max(1, (peak or 0) + attempted - budget_bytes))
    completed = state is TrialState.COMPLETE
    is_unmeasured = result.outcome.completed and not completed
    values = [float(value) for value in (speed, peak) if value is not None]
    chosen = result.steps[:: len(result.steps) // MOST_INTERMEDIATE_VALUES + 1]
    speeds = {record.step: (record.tokens or record.positions) / record.seconds for record in chosen}
    constraints = {} if violation_bytes is None else {CONSTRAINT: violation_bytes}
    return create_trial(
        state=state,
        values=values[:num_objectives] if completed else None,
        user_attrs={
            METRICS: dict(metrics),
            **{name: metrics[name] for name in COMPARED_METRICS if name in metrics},
            DETAIL: "its peak is not known" if is_unmeasured else result.detail,
            **constraints,  # for optuna-dashboard, which shows no constraints
            OUTCOME: (Outcome.CRASHED if is_unmeasured else result.outcome).value,
        },
        constraints=constraints,
        intermediate_values=speeds if completed and num_objectives == 1 else {},
    )
