"""The verification of an answer: trained again in a clean process, and compared with a plain training."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipeline.base.results import Result
from pipeline.config.space import Choice, size_of
from pipeline.searching.problem import Problem
from pipeline.searching.results import Verification
from pipeline.searching.trials import ANSWER, PLAIN, Trial, label, speed_of, speeds, standing
from pipeline.training.metrics import against_baseline
from pipeline.training.timing import is_slowed


class VerificationRun(NamedTuple):
    """A configuration that was trained again."""

    trial: Trial
    result: Result
    """With the losses of each optimizer step."""


Measure = Callable[[Choice, str], VerificationRun]
"""(configuration, its role: ANSWER or PLAIN) -> a run of it."""
Baseline = Callable[[Choice], Choice | None]
"""An answer -> the baseline that is the same training, if one fits."""


def verify(problem: Problem, runs: Sequence[Trial], baseline: Baseline, measure: Measure) -> Verification | None:
    """Train the fastest configurations that fit again, and a baseline; None if nothing fits.

    The fastest of many noisy measurements is likely to overstate its speed. So the answer is the fastest by all of its
    runs, and configurations are trained again as long as their earlier runs, of trials and of verifications, were
    faster than that. One that does not fit or does not complete is refuted, now or in an earlier verification.
    """

    def speed(one: VerificationRun) -> float:
        return speed_of(one.trial.choice, [*runs, one.trial])

    tried: list[VerificationRun] = []
    fitting = [dict(trial.choice) for trial in standing(runs) if trial.fits]
    for choice in sorted(fitting, key=lambda choice: speed_of(choice, runs), reverse=True):
        if any(speed(one) >= speed_of(choice, runs) for one in tried if one.trial.fits):
            break
        tried.append(measure(choice, ANSWER))
    if not tried:
        return None
    completed = [one for one in tried if one.trial.fits]
    answer = max(completed, key=speed, default=tried[-1])
    choice = dict(answer.trial.choice)
    wanted = _plain(problem, choice, baseline(choice)) if completed else None
    plain = next((one for one in completed if one.trial.choice == wanted), None)
    again = tried
    if plain is None and wanted is not None:
        plain = measure(wanted, PLAIN)
        again = [*tried, plain]
    own = answer.trial.tokens_per_second if answer.trial.fits else None
    was_slowed = own is not None and is_slowed(own, speeds(choice, runs))
    found = _verification(problem, answer, plain, again, was_slowed)
    if plain is None or found.same_training is not False:
        return found
    repeated = measure(dict(plain.trial.choice), PLAIN)  # it may be that no two runs agree, as without a seed
    return replace(
        found,
        repeat_difference=_compared(repeated, plain).get("max_loss_difference"),
        runs=(*found.runs, repeated.trial),
        seconds_measured=found.seconds_measured + repeated.result.seconds_total,
    )


def has_taken(num_steps: int, seconds: Sequence[float]) -> bool:
    """Return whether a run has taken so many optimizer steps, whose learning rates are those of the whole run."""
    return len(seconds) >= num_steps


def _plain(problem: Problem, choice: Choice, baseline: Choice | None) -> Choice | None:
    """Return the baseline or, if that is the answer, the one with the next smaller micro-batch."""
    smaller = (other for other in problem.baseline_beside(choice) if size_of(other) < size_of(choice))
    return baseline if baseline != choice else next(smaller, None)


def _refuted(runs: Sequence[VerificationRun], answer: Trial) -> tuple[str, ...]:
    """Return why each configuration that was faster in its trial is not the answer."""
    tried = [one.trial for one in runs if one.trial.source == ANSWER]
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
    problem: Problem,
    answer: VerificationRun,
    plain: VerificationRun | None,
    runs: Sequence[VerificationRun],
    was_slowed: bool,
) -> Verification:
    steps, plain_steps = answer.result.steps, () if plain is None else plain.result.steps
    compared = {} if plain is None else _compared(answer, plain)
    losses = [record.loss for record in (steps if plain is None else steps[: len(plain_steps)])]
    largest = max((abs(loss) for loss in losses if math.isfinite(loss)), default=0.0)
    compared_runs = [(dict(one.trial.choice), one.result) for one in (answer, plain) if one is not None]
    return Verification(
        answer=answer.trial,
        plain=None if plain is None else plain.trial,
        num_steps=len(steps) or problem.verified(dict(answer.trial.choice)).num_steps,
        max_loss_difference=compared.get("max_loss_difference"),
        tolerance=problem.roundoff(compared_runs) * largest,
        seconds_measured=sum(one.result.seconds_total for one in runs),
        runs=tuple(one.trial for one in runs),
        refuted=_refuted(runs, answer.trial),
        was_slowed=was_slowed,
        losses=tuple(one.loss for one in steps),
        plain_losses=tuple(one.loss for one in plain_steps),
        reserved_bytes=tuple(one.reserved_bytes for one in steps if one.reserved_bytes is not None),
    )


def _compared(answer: VerificationRun, plain: VerificationRun) -> dict[str, float]:
    """Return the metrics that compare the answer with the plain training, over the steps that both have."""
    count = min(len(answer.result.steps), len(plain.result.steps))
    one, other = (replace(again.result, steps=again.result.steps[:count]) for again in (answer, plain))
    found = against_baseline(one, answer.trial.metrics, other, plain.trial.metrics)
    return {name: value for name, value in found.items() if not math.isnan(value)}  # a loss that is not known
