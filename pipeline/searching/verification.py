"""The verification of an answer: trained again in a clean process, and compared with a plain training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.base.results import Outcome, Result
from pipeline.base.technique import ROUNDOFF
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.settings import merged, nested
from pipeline.config.space import Choice, size_of
from pipeline.searching.judge import peak_bytes
from pipeline.searching.measurements import is_slowed, mean_speed
from pipeline.searching.problem import SearchProblem
from pipeline.searching.results import Measurement, Trial, Verification, label, one_per_configuration, speed_of, speeds
from pipeline.training.metrics import against_baseline

Measured = tuple[Result, dict[str, float]]
"""A result and its summary metrics."""
Measure = Callable[[Choice, str], Measured]
"""(configuration, its role: `answer` or `plain`) -> what training it measured."""
Naive = Callable[[Choice], Choice | None]
"""An answer -> the naive configuration that is the same training, if one fits."""


def verify(problem: SearchProblem, trials: Sequence[Trial], naive: Naive, measure: Measure) -> Verification | None:
    """Train the fastest configurations that fit again, and a naive one; None if nothing fits.

    The fastest of many noisy measurements is likely to overstate its speed. So the answer is the fastest by all of its
    runs, and configurations are trained again as long as their trials were faster than that. One that does not fit or
    does not complete is refuted.
    """
    tried: list[_Again] = []
    fitting = [dict(trial.choice) for trial in one_per_configuration(trials) if trial.fits]
    for choice in sorted(fitting, key=lambda choice: speed_of(choice, trials), reverse=True):
        in_trials = speeds(choice, trials)
        if any(one.speed >= mean_speed(in_trials) for one in tried if one.is_ok):
            break
        tried.append(_Again(choice, in_trials, measure(choice, "answer")))
    if not tried:
        return None
    completed = [one for one in tried if one.is_ok]
    answer = max(completed, key=lambda one: one.speed, default=tried[-1])
    plain = _plain(problem, answer.choice, naive(answer.choice)) if completed else None
    against = next((one.measured for one in completed if one.choice == plain), None)
    runs = [one.measured for one in tried]
    if against is None and plain is not None:
        against = measure(plain, "plain")
        runs.append(against)
    return _verification(problem, answer, tried, plain, against, sum(result.seconds_total for result, _ in runs))


def verified_experiment(problem: SearchProblem, choice: Choice) -> Experiment:
    """Return the experiment of a configuration's trial with as many optimizer steps as the verification takes."""
    trial: Any = problem.experiment(choice).settings  # has explicit policies in place of `checkpointing=auto`
    changes = {"num_steps": problem.settings.verify_steps, "checkpointing": trial.checkpointing}
    return make_experiment(merged(merged(problem.run_values, nested(choice)), changes), "search")


@dataclass(frozen=True)
class _Again:
    """A configuration that was trained again."""

    choice: Choice
    in_trials: Sequence[float]
    """Its speeds in tokens per second in its trials."""
    measured: Measured

    @property
    def is_ok(self) -> bool:
        """Whether it completed within the budget."""
        return self.measured[0].outcome is Outcome.OK

    @property
    def was_slowed(self) -> bool:
        """Whether its new run was slowed, so that it does not count; False if it did not complete."""
        speed = self.measured[1].get("tokens_per_second") if self.is_ok else None
        return speed is not None and is_slowed(speed, [*self.in_trials, speed])

    @property
    def speed(self) -> float:
        """The speed by all of its runs; defined only if `is_ok`."""
        return mean_speed([*self.in_trials, self.measured[1]["tokens_per_second"]])


def _plain(problem: SearchProblem, choice: Choice, naive: Choice | None) -> Choice | None:
    """Return the naive configuration or, if that is the answer, the one with the next smaller micro-batch."""
    smaller = (other for other in problem.naive_beside(choice) if size_of(other) < size_of(choice))
    return naive if naive != choice else next(smaller, None)


def _verification(
    problem: SearchProblem,
    answer: _Again,
    tried: Sequence[_Again],
    plain: Choice | None,
    against: Measured | None,
    seconds_measured: float,
) -> Verification:
    result, metrics = answer.measured
    compared = {} if against is None else against_baseline(result, metrics, *against)
    losses = [record.loss for record in result.steps]
    formats = [
        technique.number_format
        for one in (answer.choice, plain or answer.choice)
        for technique in problem.configurations.experiment(one).techniques
        if technique.number_format is not None
    ]
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
        num_steps=problem.settings.verify_steps,
        outcome=result.outcome.value,
        metrics=metrics,
        plain_outcome=None if against is None else against[0].outcome.value,
        plain_metrics={} if against is None else against[1],
        max_loss_difference=compared.get("max_loss_difference"),
        tolerance=max(ROUNDOFF[name] for name in formats) * max(losses, default=0.0),
        seconds_measured=seconds_measured,
        measurements=tuple(
            _measurement(choice, measured)
            for choice, measured in (*((one.choice, one.measured) for one in tried), (plain, against))
            if choice is not None and measured is not None
        ),
        refuted=(*failed, *slower),
        was_slowed=answer.was_slowed,
    )


def _measurement(choice: Choice, measured: Measured) -> Measurement:
    result, metrics = measured
    return Measurement(
        choice=choice,
        outcome=result.outcome.value,
        tokens_per_second=metrics.get("tokens_per_second") if result.outcome.completed else None,
        peak_bytes=peak_bytes(metrics),
    )
