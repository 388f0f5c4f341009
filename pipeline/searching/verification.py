"""The verification of an answer: trained again in a clean process, and compared with a plain training."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeline.base.results import Outcome, Result
from pipeline.config.space import Choice, size_of
from pipeline.searching.interface import Problem
from pipeline.searching.results import (
    ANSWER,
    PLAIN,
    Trial,
    Verification,
    label,
    one_per_configuration,
    speed_of,
    speeds,
)
from pipeline.training.metrics import against_baseline
from pipeline.training.timing import is_slowed

Measure = Callable[[Choice, str], tuple[Result, dict[str, float]]]
"""(configuration, its role: ANSWER or PLAIN) -> the result of training it, and its summary metrics."""
Run = tuple[Trial, Result]
"""A configuration that was trained again."""
Baseline = Callable[[Choice], Choice | None]
"""An answer -> the baseline that is the same training, if one fits."""


def verify(
    problem: Problem,
    trials: Sequence[Trial],
    baseline: Baseline,
    measure: Measure,
    extra: Sequence[Trial] = (),
    number: int = 0,
) -> Verification | None:
    """Train the fastest configurations that fit again, and a baseline; None if nothing fits.

    The fastest of many noisy measurements is likely to overstate its speed. So the answer is the fastest by all of its
    runs, and configurations are trained again as long as their earlier runs were faster than that: their trials and
    those of earlier verifications, `extra`. One that does not fit or does not complete is refuted.
    """

    def run(choice: Choice, role: str) -> Run:
        result, metrics = measure(choice, role)
        trial = Trial(
            number=number,
            source=role,
            choice=choice,
            outcome=result.outcome.value,
            detail=result.detail,
            fits=result.outcome is Outcome.OK,
            metrics=metrics,
        )
        return trial, result

    def speed(one: Trial) -> float:
        return speed_of(one.choice, trials, [*extra, one])

    tried: list[Run] = []
    fitting = [dict(trial.choice) for trial in one_per_configuration(trials) if trial.fits]
    for choice in sorted(fitting, key=lambda choice: speed_of(choice, trials, extra), reverse=True):
        if any(speed(one) >= speed_of(choice, trials, extra) for one, _ in tried if one.fits):
            break
        tried.append(run(choice, ANSWER))
    if not tried:
        return None
    completed = [one for one in tried if one[0].fits]
    answer = max(completed, key=lambda one: speed(one[0]), default=tried[-1])
    choice = dict(answer[0].choice)
    wanted = _plain(problem, choice, baseline(choice)) if completed else None
    plain = next((one for one in completed if one[0].choice == wanted), None)
    runs = tried
    if plain is None and wanted is not None:
        plain = run(wanted, PLAIN)
        runs = [*tried, plain]
    own = answer[0].tokens_per_second if answer[0].fits else None
    was_slowed = own is not None and is_slowed(own, speeds(choice, trials, extra))
    return _verification(problem, answer, plain, runs, was_slowed)


def has_taken(num_steps: int, seconds: Sequence[float]) -> bool:
    """Return whether a run has taken so many optimizer steps, whose learning rates are those of the whole run."""
    return len(seconds) >= num_steps


def _plain(problem: Problem, choice: Choice, baseline: Choice | None) -> Choice | None:
    """Return the baseline or, if that is the answer, the one with the next smaller micro-batch."""
    smaller = (other for other in problem.baseline_beside(choice) if size_of(other) < size_of(choice))
    return baseline if baseline != choice else next(smaller, None)


def _refuted(runs: Sequence[Run], answer: Trial) -> tuple[str, ...]:
    """Return why each configuration that was faster in its trial is not the answer."""
    tried = [one for one, _ in runs if one.source == ANSWER]
    failed = [
        f"{label(one.choice)} was faster in its trial, but ended {one.outcome} when it was trained again"
        for one in tried
        if not one.fits
    ]
    slower = [
        f"{label(one.choice)} was faster in its trial, but slower by the mean of its runs"
        for one in tried[: tried.index(answer)]
        if one.fits
    ]
    return (*failed, *slower)


def _verification(
    problem: Problem, answer: Run, plain: Run | None, runs: Sequence[Run], was_slowed: bool
) -> Verification:
    result, steps = answer[1], () if plain is None else plain[1].steps
    compared = {} if plain is None else _compared(answer, plain)
    losses = [record.loss for record in (result.steps if plain is None else result.steps[: len(steps)])]
    compared_runs = [(dict(trial.choice), one) for trial, one in (answer, plain or answer)]
    return Verification(
        answer=answer[0],
        plain=None if plain is None else plain[0],
        num_steps=len(result.steps) or problem.verified(dict(answer[0].choice)).num_steps,
        max_loss_difference=compared.get("max_loss_difference"),
        tolerance=problem.roundoff(compared_runs) * max(map(abs, losses), default=0.0),
        seconds_measured=sum(one.seconds_total for _, one in runs),
        runs=tuple(trial for trial, _ in runs),
        refuted=_refuted(runs, answer[0]),
        was_slowed=was_slowed,
        losses=tuple(one.loss for one in result.steps),
        plain_losses=tuple(one.loss for one in steps),
        reserved_bytes=tuple(one.reserved_bytes for one in result.steps if one.reserved_bytes is not None),
    )


def _compared(answer: Run, plain: Run) -> dict[str, float]:
    """Return the metrics that compare the answer with the plain training, over the steps that both have."""
    count = min(len(answer[1].steps), len(plain[1].steps))
    one, other = (replace(result, steps=result.steps[:count]) for _, result in (answer, plain))
    found = against_baseline(one, dict(answer[0].metrics), other, dict(plain[0].metrics))
    return {name: value for name, value in found.items() if not math.isnan(value)}  # a loss that is not known
