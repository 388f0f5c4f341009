"""The answer checked: trained again in a fresh process within the budget, and compared with a plain training."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pipeline.base.results import Outcome, Result
from pipeline.config.experiment import make_experiment
from pipeline.config.settings import merged, nested
from pipeline.config.space import Choice
from pipeline.prediction.summary import summary
from pipeline.searching.judge import peak_bytes
from pipeline.searching.problem import SearchProblem
from pipeline.searching.results import Measurement, Trial, Verification, label, one_per_configuration
from pipeline.tracking.parent import ParentRun
from pipeline.training.metrics import against_baseline

ROUNDOFF = {"fp32": 2.0**-17, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Share by which a loss may differ: half the distance between two numbers of the format, for fp32 that of 64 sums."""
Done = tuple[Result, dict[str, float]]


def verify(
    plan: SearchProblem, rows: Sequence[Trial], naive: Choice | None, parent: ParentRun, say: Callable[[str], None]
) -> Verification | None:
    """Train the fastest configurations that fit again, and a naive one; None where nothing fits.

    The fastest of many that are measured once has been lucky, too. So the answer is the fastest by both of its
    measurements, and others are trained again as long as they were faster than that in their trials. One that does not
    fit, or does not end, is refuted.
    """
    tried: list[_Again] = []
    for row in sorted((row for row in one_per_configuration(rows) if row.fits), key=_speed, reverse=True):
        if any(one.speed >= _speed(row) for one in tried if one.holds):
            break
        choice = dict(row.choice)
        tried.append(_Again(choice, _speed(row), _train(plan, choice, "answer", parent, say)))
    if not tried:
        return None
    held = [one for one in tried if one.holds]
    answer = max(held, key=lambda one: one.speed, default=tried[-1])
    plain = _plain(plan, answer.choice, naive) if held else None
    against = next((one.done for one in held if one.choice == plain), None)
    runs = [one.done for one in tried]
    if against is None and plain is not None:
        against = _train(plan, plain, "plain", parent, say)
        runs.append(against)
    return _verification(plan, answer, tried, plain, against, sum(result.seconds_total for result, _ in runs))


@dataclass(frozen=True)
class _Again:
    """A configuration that was trained again."""

    choice: Choice
    speed_in_trial: float
    done: Done

    @property
    def holds(self) -> bool:
        """Whether it ended well."""
        return self.done[0].outcome is Outcome.OK

    @property
    def speed(self) -> float:
        """Geometric mean of both speeds in tokens per second; it must hold."""
        return math.sqrt(self.speed_in_trial * self.done[1]["tokens_per_second"])


def _plain(plan: SearchProblem, choice: Choice, naive: Choice | None) -> Choice | None:
    """Return the naive configuration or, where that is the answer, the one with the next smaller micro-batch."""
    smaller = (other for other in plan.naive if _size(other) < _size(choice))
    return naive if naive != choice else next(smaller, None)


def _verification(
    plan: SearchProblem,
    answer: _Again,
    tried: Sequence[_Again],
    plain: Choice | None,
    against: Done | None,
    seconds_measured: float,
) -> Verification:
    result, metrics = answer.done
    compared = {} if against is None else against_baseline(result, metrics, *against)
    losses = [record.loss for record in result.steps]
    formats = [plan.experiment(one).settings.precision for one in (answer.choice, plain or answer.choice)]  # type: ignore[attr-defined]
    failed = [
        f"{label(one.choice)} was faster and ended {one.done[0].outcome} when it was trained again"
        for one in tried
        if not one.holds
    ]
    slower = [
        f"{label(one.choice)} was faster in its trial, and slower by the two together"
        for one in tried[: tried.index(answer)]
        if one.holds
    ]
    return Verification(
        choice=answer.choice,
        plain=plain,
        num_steps=plan.settings.verify_steps,
        outcome=result.outcome.value,
        metrics=metrics,
        plain_outcome=None if against is None else against[0].outcome.value,
        plain_metrics={} if against is None else against[1],
        max_loss_difference=compared.get("max_loss_difference"),
        tolerance=max(ROUNDOFF[name] for name in formats) * max(losses, default=0.0),
        seconds_measured=seconds_measured,
        measurements=tuple(
            _measurement(choice, done)
            for choice, done in (*((one.choice, one.done) for one in tried), (plain, against))
            if choice is not None and done is not None
        ),
        refuted=(*failed, *slower),
    )


def _measurement(choice: Choice, done: Done) -> Measurement:
    result, metrics = done
    return Measurement(
        choice=choice,
        outcome=result.outcome.value,
        tokens_per_second=metrics.get("tokens_per_second") if result.outcome.completed else None,
        peak_bytes=peak_bytes(metrics),
    )


def _speed(row: Trial) -> float:
    return row.tokens_per_second or 0.0


def _size(choice: Choice) -> int:
    return int(str(choice.get("micro_batch_size", 0)))


def _train(plan: SearchProblem, choice: Choice, role: str, parent: ParentRun, say: Callable[[str], None]) -> Done:
    length: Mapping[str, object] = {"num_steps": plan.settings.verify_steps}
    experiment = make_experiment(merged(merged(plan.run_values, nested(choice)), length), "search")
    name = f"verification: {role}"
    result, metrics = parent.run(
        name, experiment, partial(summary, experiment), {"variant": label(choice), "verification": role}
    )
    say(f"{name}: {label(choice)}: {result.outcome} in {result.seconds_total:.1f} s")
    return result, metrics
