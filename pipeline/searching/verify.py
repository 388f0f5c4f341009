"""The answer checked: trained again in a fresh process within the budget, and compared with a plain training."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pipeline.contracts import Outcome, Result
from pipeline.experiment import make_experiment
from pipeline.metrics import against_baseline
from pipeline.predict import summary
from pipeline.report.certificate import Verification
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
    """Train the fastest configuration that fits again, and a naive one; None where nothing fits.

    An answer that does not fit, or does not end, when it is trained again is refuted, and the next best is the answer.
    """
    verification = None
    refuted: list[str] = []
    for row in sorted((row for row in rows if row.fits), key=lambda row: -(row.tokens_per_second or 0)):
        choice = dict(row.choice)
        done = _train(plan, choice, "answer", parent, say)
        is_refuted = done[0].outcome is not Outcome.OK
        verification = _against_plain(plan, choice, done, None if is_refuted else naive, tuple(refuted), parent, say)
        if not is_refuted:
            break
        refuted.append(f"{in_words(choice)} was faster and ended {done[0].outcome} when it was trained again")
    return verification


def _against_plain(
    plan: SearchPlan,
    choice: Choice,
    done: Done,
    naive: Choice | None,
    refuted: tuple[str, ...],
    parent: ParentRun,
    say: Callable[[str], None],
) -> Verification:
    """Compare with the naive configuration or, where that is the answer, with the next smaller micro-batch."""
    smaller = [other for other in plan.naive if _size(other) < _size(choice)]
    plain = naive if naive != choice else next(iter(smaller), None)
    against = None if plain is None else _train(plan, plain, "plain", parent, say)
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
        refuted=refuted,
    )


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
