"""The verification of an answer: trained again in a clean process, and compared with a plain training."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeline.base.results import Outcome, Result
from pipeline.config.space import Choice, size_of
from pipeline.searching.interface import Problem
from pipeline.searching.results import Measurement, Trial, Verification, label, one_per_configuration, speed_of, speeds
from pipeline.searching.trial_record import peak_bytes
from pipeline.training.metrics import against_baseline, speed_in
from pipeline.training.timing import is_slowed, mean_speed

Measured = tuple[Result, dict[str, float]]
"""A result and its summary metrics."""
Measure = Callable[[Choice, str], Measured]
"""(configuration, its role: `answer` or `plain`) -> what training it measured."""
Baseline = Callable[[Choice], Choice | None]
"""An answer -> the baseline that is the same training, if one fits."""


def verify(
    problem: Problem,
    trials: Sequence[Trial],
    baseline: Baseline,
    measure: Measure,
    extra: Sequence[Measurement] = (),
    title: str = "verification",
) -> Verification | None:
    """Train the fastest configurations that fit again, and a baseline; None if nothing fits.

    The fastest of many noisy measurements is likely to overstate its speed. So the answer is the fastest by all of its
    runs, and configurations are trained again as long as their earlier runs were faster than that: their trials and
    those of earlier verifications, `extra`. One that does not fit or does not complete is refuted.
    """
    tried: list[_Again] = []
    fitting = [dict(trial.choice) for trial in one_per_configuration(trials) if trial.fits]
    for choice in sorted(fitting, key=lambda choice: speed_of(choice, trials, extra), reverse=True):
        before = speeds(choice, trials, extra)
        if any(one.speed >= mean_speed(before) for one in tried if one.is_ok):
            break
        tried.append(_Again(choice, before, measure(choice, "answer")))
    if not tried:
        return None
    completed = [one for one in tried if one.is_ok]
    answer = max(completed, key=lambda one: one.speed, default=tried[-1])
    plain = _plain(problem, answer.choice, baseline(answer.choice)) if completed else None
    against = next((one.measured for one in completed if one.choice == plain), None)
    runs = [(f"{title}: answer", one.choice, one.measured) for one in tried]
    if against is None and plain is not None:
        against = measure(plain, "plain")
        runs.append((f"{title}: plain", plain, against))
    return _verification(problem, answer, tried, plain, against, runs)


@dataclass(frozen=True)
class StopAfter:
    """Stops a run after so many optimizer steps, whose learning rates are those of the whole run."""

    num_steps: int

    def __call__(self, seconds: Sequence[float]) -> bool:
        """Whether that many have been taken."""
        return len(seconds) >= self.num_steps


@dataclass(frozen=True)
class _Again:
    """A configuration that was trained again."""

    choice: Choice
    before: Sequence[float]
    """Its speeds in tokens per second in its earlier runs."""
    measured: Measured

    @property
    def is_ok(self) -> bool:
        """Whether it completed within the budget."""
        return self.measured[0].outcome is Outcome.OK

    @property
    def was_slowed(self) -> bool:
        """Whether its new run was slowed, so that it does not count; False if it did not complete."""
        speed = speed_in(self.measured[1]) if self.is_ok else None
        return speed is not None and is_slowed(speed, [*self.before, speed])

    @property
    def speed(self) -> float:
        """The speed by all of its runs; defined only if `is_ok`."""
        speed = speed_in(self.measured[1])
        assert speed is not None
        return mean_speed([*self.before, speed])


def _plain(problem: Problem, choice: Choice, baseline: Choice | None) -> Choice | None:
    """Return the baseline or, if that is the answer, the one with the next smaller micro-batch."""
    smaller = (other for other in problem.baseline_beside(choice) if size_of(other) < size_of(choice))
    return baseline if baseline != choice else next(smaller, None)


def _verification(
    problem: Problem,
    answer: _Again,
    tried: Sequence[_Again],
    plain: Choice | None,
    against: Measured | None,
    runs: Sequence[tuple[str, Choice, Measured]],
) -> Verification:
    result, metrics = answer.measured
    compared = {} if against is None else _compared(answer.measured, against)
    num_compared = len(result.steps if against is None else against[0].steps)
    losses = [record.loss for record in result.steps[:num_compared]]
    compared_runs = [(answer.choice, result), *([] if against is None or plain is None else [(plain, against[0])])]
    failed = [
        f"{label(one.choice)} was faster in its trial, but ended {one.measured[0].outcome} when it was trained again"
        for one in tried
        if not one.is_ok
    ]
    slower = [
        f"{label(one.choice)} was faster in its trial, but slower by the mean of its runs"
        for one in tried[: tried.index(answer)]
        if one.is_ok
    ]
    return Verification(
        choice=answer.choice,
        plain=plain,
        num_steps=len(result.steps) or problem.verified(answer.choice).num_steps,
        outcome=result.outcome.value,
        metrics=metrics,
        plain_outcome=None if against is None else against[0].outcome.value,
        plain_metrics={} if against is None else against[1],
        max_loss_difference=compared.get("max_loss_difference"),
        tolerance=problem.roundoff(compared_runs) * max(map(abs, losses), default=0.0),
        seconds_measured=sum(result.seconds_total for _, _, (result, _) in runs),
        measurements=tuple(_measurement(*one) for one in runs),
        refuted=(*failed, *slower),
        losses=tuple(one.loss for one in result.steps),
        plain_losses=() if against is None else tuple(one.loss for one in against[0].steps),
        was_slowed=answer.was_slowed,
        reserved_bytes=tuple(one.reserved_bytes for one in result.steps if one.reserved_bytes is not None),
    )


def _compared(answer: Measured, plain: Measured) -> dict[str, float]:
    """Return the metrics that compare the answer with the plain training, over the steps that both have."""
    count = min(len(answer[0].steps), len(plain[0].steps))
    (one, metrics), (other, others) = ((replace(each, steps=each.steps[:count]), own) for each, own in (answer, plain))
    found = against_baseline(one, metrics, other, others)
    return {name: value for name, value in found.items() if not math.isnan(value)}  # a loss that is not known


def _measurement(name: str, choice: Choice, measured: Measured) -> Measurement:
    result, metrics = measured
    return Measurement(
        name=name,
        choice=choice,
        outcome=result.outcome.value,
        tokens_per_second=speed_in(metrics) if result.outcome.completed else None,
        peak_bytes=peak_bytes(metrics),
    )
