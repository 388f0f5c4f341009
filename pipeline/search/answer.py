"""What a search found, in words."""

from collections.abc import Sequence

from pipeline.metrics import MIB
from pipeline.report.search import TrialRow, in_words, pareto_front
from pipeline.search.judge import peak_bytes
from pipeline.search.plan import SearchPlan
from pipeline.search.study import CONSTRAINT, DETAIL, FIGURES, OUTCOME, StoredStudy


def question(plan: SearchPlan) -> str:
    """Return what the search answers."""
    return (
        f"What is the fastest way to train {plan.base.settings.model} at an effective batch of "
        f"{plan.base.effective_batch_size} within {plan.budget_bytes / MIB:,.0f} MiB?"
    )


def rows_of(plan: SearchPlan, study: StoredStudy) -> list[TrialRow]:
    """Return the study's measured trials, those of earlier sessions included."""
    return [
        TrialRow(
            number=trial.number,
            choice={name: trial.params[name] for name in plan.space.dimensions},
            outcome=trial.user_attrs[OUTCOME],
            detail=trial.user_attrs[DETAIL],
            fits=trial.values is not None and trial.constraints.get(CONSTRAINT, 1.0) <= 0,
            peak_bytes=peak_bytes(trial.user_attrs[FIGURES]),
            figures=trial.user_attrs[FIGURES],
        )
        for trial in study.trials
    ]


def answer(plan: SearchPlan, rows: Sequence[TrialRow]) -> str:
    """Return the fastest configuration that fits, its memory and speed, and how it compares with the naive one."""
    best = best_row(rows)
    budget, effective = plan.budget_bytes, plan.base.effective_batch_size
    space = f"{len(rows)} of {len(plan.space.choices)} configurations measured"
    if best is None:
        peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None and row.tokens_per_second is not None]
        smallest = f"the smallest peak seen is {min(peaks) / MIB:,.1f} MiB" if peaks else "none ran to its end"
        return f"Nothing fits {budget / MIB:,.1f} MiB at an effective batch of {effective}: {smallest} ({space})."
    peak, speed = best.peak_bytes or 0, best.tokens_per_second or 0
    text = (
        f"The fastest that fits {budget / MIB:,.1f} MiB at an effective batch of {effective}: {in_words(best.choice)}. "
        f"It peaks at {peak / MIB:,.1f} MiB ({(budget - peak) / MIB:,.1f} MiB of headroom) "
        f"and trains {speed:,.0f} tokens/s"
    )
    fitting = {tuple(row.choice.items()): row for row in rows if row.fits}
    plain = next((fitting[key] for key in (tuple(choice.items()) for choice in plan.naive) if key in fitting), None)
    if plain is best:
        text += ", and is the naive configuration itself"
    elif plain is not None and plain.tokens_per_second:
        text += f", {speed / plain.tokens_per_second:.2f} x the naive configuration ({in_words(plain.choice)})"
    if plan.settings.objectives == "pareto":
        front = "; ".join(f"{in_words(row.choice)}: {measured(row)}" for row in pareto_front(rows))
        text += f". Pareto front: {front}"
    return f"{text} ({space})."


def measured(row: TrialRow) -> str:
    """Return what a trial showed, in a few words."""
    if row.tokens_per_second is None or row.peak_bytes is None:
        return row.outcome
    return f"{row.outcome}, {row.peak_bytes / MIB:,.1f} MiB, {row.tokens_per_second:,.0f} tokens/s"


def best_row(rows: Sequence[TrialRow]) -> TrialRow | None:
    """Return the fastest configuration that fits."""
    return max((row for row in rows if row.fits), key=lambda row: row.tokens_per_second or 0, default=None)


def incumbent(rows: Sequence[TrialRow]) -> str:
    """Return the best so far, in a few words."""
    best = best_row(rows)
    return "nothing fits yet" if best is None else f"best {best.tokens_per_second:,.0f} tokens/s"
