"""The answer checked: trained again in a fresh process within the budget, and compared with a plain training."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pipeline.contracts import Outcome, Result
from pipeline.experiment import make_experiment
from pipeline.metrics import against_baseline
from pipeline.predict import summary
from pipeline.report.certificate import Twice, Verification
from pipeline.report.trials import TrialRow, in_words
from pipeline.searching.plan import SearchPlan
from pipeline.settings import merged, nested
from pipeline.space import Choice
from pipeline.tracking.parent import ParentRun

ROUNDOFF = {"fp32": 2.0**-17, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Share by which a loss may differ: half the distance between two numbers of the format, for fp32 that of 64 sums."""
Done = tuple[Result, dict[str, float]]


def verify(
    plan: SearchPlan, rows: Sequence[TrialRow], naive: Choice | None, parent: ParentRun, say: Callable[[str], None]
) -> Verification | None:
    """Train the fastest configurations that fit again, and a naive one; None where nothing fits.

    The fastest of many that are measured once has been lucky, too. So the answer is the fastest by both of its
    measurements, and others are trained again as long as they were faster than that in their trials. One that does not
    fit, or does not end, is refuted.
    """
    again: list[tuple[Twice, Done]] = []
    refuted: list[tuple[str, Choice, Done]] = []
    runs: list[Done] = []
    for row in sorted((row for row in rows if row.fits), key=_speed, reverse=True):
        if again and _speed(row) <= max(twice.tokens_per_second for twice, _ in again):
            break
        choice = dict(row.choice)
        done = _train(plan, choice, "answer", parent, say)
        runs.append(done)
        result, figures = done
        if result.outcome is Outcome.OK:
            again.append((Twice(choice, math.sqrt(_speed(row) * figures["tokens_per_second"])), done))
        else:
            reason = f"{in_words(choice)} was faster and ended {result.outcome} when it was trained again"
            refuted.append((reason, choice, done))
    reasons = [reason for reason, *_ in refuted]
    if not again:
        return _verification(plan, *refuted[-1][1:], runs=runs, refuted=tuple(reasons)) if refuted else None
    answer, done = max(again, key=lambda pair: pair[0].tokens_per_second)
    reasons += [
        f"{in_words(twice.choice)} was faster in its trial, and slower by the two together"
        for twice, _ in again[: again.index((answer, done))]
    ]
    plain = _plain(plan, dict(answer.choice), naive)
    against = next((other for twice, other in again if twice.choice == plain), None)
    if against is None and plain is not None:
        against = _train(plan, plain, "plain", parent, say)
        runs.append(against)
    twices = tuple(twice for twice, _ in again)
    return _verification(plan, dict(answer.choice), done, plain, against, runs, twices, tuple(reasons))


def _plain(plan: SearchPlan, choice: Choice, naive: Choice | None) -> Choice | None:
    """Return the naive configuration or, where that is the answer, the one with the next smaller micro-batch."""
    smaller = (other for other in plan.naive if _size(other) < _size(choice))
    return naive if naive != choice else next(smaller, None)


def _verification(
    plan: SearchPlan,
    choice: Choice,
    done: Done,
    plain: Choice | None = None,
    against: Done | None = None,
    runs: Sequence[Done] = (),
    twices: tuple[Twice, ...] = (),
    refuted: tuple[str, ...] = (),
) -> Verification:
    result, figures = done
    compared = {} if against is None else against_baseline(result, figures, *against)
    losses = [record.loss for record in result.steps]
    formats = [plan.experiment(one).settings.precision for one in (choice, plain or choice)]  # type: ignore[attr-defined]
    return Verification(
        choice=choice,
        plain=plain,
        num_steps=plan.settings.verify_steps,
        outcome=result.outcome.value,
        figures=figures,
        plain_outcome=None if against is None else against[0].outcome.value,
        plain_figures={} if against is None else against[1],
        max_loss_difference=compared.get("max_loss_difference"),
        tolerance=max(ROUNDOFF[name] for name in formats) * max(losses, default=0.0),
        seconds_measured=sum(result.seconds_total for result, _ in runs),
        twice=twices,
        refuted=refuted,
    )


def _speed(row: TrialRow) -> float:
    return row.tokens_per_second or 0.0


def _size(choice: Choice) -> int:
    return int(str(choice.get("micro_batch_size", 0)))


def _train(plan: SearchPlan, choice: Choice, role: str, parent: ParentRun, say: Callable[[str], None]) -> Done:
    length: Mapping[str, object] = {"num_steps": plan.settings.verify_steps}
    experiment = make_experiment(merged(merged(plan.run_values, nested(choice)), length), "search")
    name = f"verification: {role}"
    result, figures = parent.run(
        name, experiment, partial(summary, experiment), {"variant": in_words(choice), "verification": role}
    )
    say(f"{name}: {in_words(choice)}: {result.outcome} in {result.seconds_total:.1f} s")
    return result, figures
