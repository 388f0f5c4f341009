"""What to measure next: by what is predicted, or as one of Optuna's samplers proposes."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.config.space import Choice
from pipeline.searching.acquisition import CONFIDENCE, Outlook
from pipeline.searching.optuna_samplers import choose, next_naive
from pipeline.searching.problem import SearchPlan
from pipeline.searching.results import NOT_REACHED, SLOWER, UNFIT, Certificate, Trial, Twice, Unmeasured, each_once
from pipeline.searching.sampler import PredictiveSampler
from pipeline.searching.study import StoredStudy


@dataclass(frozen=True)
class Proposal:
    """A configuration to measure."""

    choice: Choice
    predicted_seconds: float | None = None
    """Of an optimizer step; None where nothing measured tells, or its own first time would."""
    again: bool = False
    """Whether it is measured already, and its time doubted."""


class Proposer(Protocol):
    """Chooses what is measured, and knows what that proves."""

    def next(self, rows: Sequence[Trial]) -> Proposal | None:
        """Return what to measure after these trials; None where nothing is worth it, or all is being measured."""

    def naive(self, rows: Sequence[Trial]) -> Choice | None:
        """Return the largest naive micro-batch that fits, as far as is known."""

    def certificate(self, rows: Sequence[Trial], twice: Sequence[Twice] = ()) -> Certificate | None:
        """Return what the trials prove, and what was trained twice; None where nothing."""


class Blind:
    """One of Optuna's samplers, after a bisection to what a person would try."""

    def __init__(self, plan: SearchPlan, study: StoredStudy) -> None:
        self._plan, self._study = plan, study

    def next(self, rows: Sequence[Trial]) -> Proposal | None:
        """Return the middle of the naive micro-batches still possible, then what the sampler proposes."""
        plan, study = self._plan, self._study
        fitting = [dict(row.choice) for row in each_once(rows) if row.fits]
        choice = next_naive(plan.naive, fitting, study.taken) or choose(
            plan.space.choices,
            plan.space,
            study.trials,
            study.taken,
            study.directions,
            plan.settings.sampler,
            plan.base.settings.seed,
        )
        return None if choice is None else Proposal(choice)

    def naive(self, rows: Sequence[Trial]) -> Choice | None:
        """Return the first naive configuration that was measured to fit."""
        fitting = [dict(row.choice) for row in each_once(rows) if row.fits]
        return next((choice for choice in self._plan.naive if choice in fitting), None)

    def certificate(self, rows: Sequence[Trial], twice: Sequence[Twice] = ()) -> None:
        """Return nothing: what was not measured is not known."""
        return


class Predictive:
    """The search's own sampler: what is predicted to fit and may be faster, until nothing may."""

    def __init__(self, plan: SearchPlan, study: StoredStudy, sampler: PredictiveSampler) -> None:
        self._plan, self._study, self._sampler = plan, study, sampler

    def next(self, rows: Sequence[Trial]) -> Proposal | None:
        """Return what is doubtful, then what promises most; where the law of time does not hold, what TPE proposes."""
        outlook = self._outlook()
        if outlook.doubtful is not None:
            return Proposal(self._sampler.candidates[outlook.doubtful].choice, again=True)
        if not outlook.holds:
            return self._by_tpe(outlook)
        if outlook.next is None:
            return None
        seconds = outlook.predicted_seconds
        choice = self._sampler.candidates[outlook.next].choice
        return Proposal(choice, None if seconds is None else float(seconds[outlook.next]))

    def naive(self, rows: Sequence[Trial]) -> Choice | None:
        """Return the first naive configuration that is predicted to fit, and was not measured otherwise."""
        eligible = self._outlook().eligible
        fitting = [self._sampler.candidates[number].choice for number in eligible]
        return next((choice for choice in self._plan.naive if choice in fitting), None)

    def certificate(self, rows: Sequence[Trial], twice: Sequence[Twice] = ()) -> Certificate:
        """Return the bound that the measurements have reached, and what was left out."""
        again = {self._sampler.number_of(one.choice): one.tokens_per_second for one in twice}
        outlook = self._study.outlook(self._sampler, again)
        counting = each_once(rows)
        measured = [dict(row.choice) for row in counting]
        left = [
            self._unmeasured(number, outlook)
            for number, candidate in enumerate(self._sampler.candidates)
            if candidate.choice not in measured
        ]
        return Certificate(
            gap=self._plan.settings.gap,
            bound=outlook.bound if outlook.holds else None,
            left=outlook.left if outlook.holds else None,
            confidence=CONFIDENCE,
            law_is_off=outlook.law_is_off,
            holds=outlook.holds,
            num_configurations=len(self._sampler.candidates),
            num_measured=len(counting),
            unmeasured=tuple(left),
            seconds_measured=_seconds_of(rows),
            seconds_of_brute_force=_brute_force(counting, left),
        )

    def _outlook(self) -> Outlook:
        return self._study.outlook(self._sampler)

    def _by_tpe(self, outlook: Outlook) -> Proposal | None:
        plan, study = self._plan, self._study
        fitting = [self._sampler.candidates[number].choice for number in sorted(outlook.eligible)]
        choice = choose(
            fitting, plan.space, study.trials, study.taken, study.directions, "tpe", plan.base.settings.seed
        )
        return None if choice is None else Proposal(choice)

    def _unmeasured(self, number: int, outlook: Outlook) -> Unmeasured:
        candidate, seconds = self._sampler.candidates[number], outlook.predicted_seconds
        proven = outlook.holds and outlook.left is not None and outlook.left <= self._plan.settings.gap
        return Unmeasured(
            choice=candidate.choice,
            predicted_peak_bytes=candidate.predicted_bytes,
            predicted_seconds_per_step=None if seconds is None else float(seconds[number]),
            reason=UNFIT if number not in outlook.eligible else SLOWER if proven else NOT_REACHED,
        )


def make_proposer(plan: SearchPlan, study: StoredStudy, sampler: PredictiveSampler | None) -> Proposer:
    """Return what the settings ask for, with the sampler of ahead.make_sampler."""
    return Blind(plan, study) if sampler is None else Predictive(plan, study, sampler)


def _seconds_of(rows: Sequence[Trial]) -> float:
    """Return the device time of trials."""
    return sum(row.metrics.get("seconds_total", 0.0) for row in rows)


def _brute_force(rows: Sequence[Trial], left: Sequence[Unmeasured]) -> float | None:
    """Return the device time of the whole space, what is left taking as many of its steps as the median trial."""
    ratios = [
        row.metrics["seconds_total"] / row.metrics["seconds_per_step"]
        for row in rows
        if "seconds_per_step" in row.metrics
    ]
    predicted = [one.predicted_seconds_per_step for one in left]
    if not ratios or None in predicted:
        return None
    return _seconds_of(rows) + statistics.median(ratios) * sum(one for one in predicted if one is not None)
