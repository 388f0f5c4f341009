"""Which configuration to measure next: by prediction, or as one of Optuna's samplers proposes."""

import statistics
from collections.abc import Collection, Sequence
from typing import Protocol

from pipeline.config.given import written
from pipeline.config.space import Choice
from pipeline.searching.acquisition import CONFIDENCE, Acquisition
from pipeline.searching.candidates import not_predicted_notes
from pipeline.searching.certificate import (
    EXPECTED_UNFIT,
    FAILING,
    NOT_PREDICTED,
    NOT_TRIED,
    SLOWER,
    UNFIT,
    Certificate,
    Unmeasured,
    stated,
)
from pipeline.searching.optuna_samplers import choose, next_baseline
from pipeline.searching.problem import Problem
from pipeline.searching.sampler import PredictiveSampler
from pipeline.searching.study import StoredStudy
from pipeline.searching.trials import FAILED, Proposal, Trial, one_per_configuration


class Proposer(Protocol):
    """Proposes the configuration to measure next, and certifies the answer if it can.

    `extra` has measurements in addition to the trials, such as those of a verification.
    """

    def next(self, rows: Sequence[Trial], extra: Sequence[Trial] = ()) -> Proposal | None:
        """Return the configuration to measure after these trials; None if none is worth its time beside what runs."""

    def baseline(self, rows: Sequence[Trial], answer: Choice) -> Choice | None:
        """Return the baseline to compare the answer with: with the largest micro-batch that fits.

        As far as is known, and with what makes the answer another training.
        """

    def certificate(self, rows: Sequence[Trial], extra: Sequence[Trial] = ()) -> Certificate | None:
        """Return the certificate of the answer; None if the sampler states no bound, as Optuna's do not."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """How many configurations could not be predicted so far, a sentence for each cause."""
        return ()


class OptunaProposer(Proposer):
    """Proposes the baselines by bisection, then what one of Optuna's samplers proposes."""

    def __init__(self, problem: Problem, study: StoredStudy) -> None:
        self._problem, self._study = problem, study

    def next(self, rows: Sequence[Trial], extra: Sequence[Trial] = ()) -> Proposal | None:
        """Return the middle of the micro-batches of the baseline that may fit, then the proposals of the sampler."""
        problem, study = self._problem, self._study
        choice = next_baseline(problem.baselines, _fitting(rows), study.taken) or choose(
            problem.space.choices,
            problem.space,
            study.trials,
            study.taken,
            study.directions,
            problem.settings.sampler,
            problem.seed,
        )
        return None if choice is None else Proposal(choice)

    def baseline(self, rows: Sequence[Trial], answer: Choice) -> Choice | None:
        """Return the first that was measured to fit, or was not measured while a baseline of its micro-batch fits."""
        fitting, measured = _fitting(rows), [dict(row.choice) for row in rows]
        sizes = {choice.get("micro_batch_size") for choice in self._problem.baselines if choice in fitting}

        def may_fit(choice: Choice) -> bool:
            return choice in fitting or (choice not in measured and choice.get("micro_batch_size") in sizes)

        return next(filter(may_fit, self._problem.baseline_beside(answer)), None)


class PredictiveProposer(Proposer):
    """Proposes configurations that are predicted to fit and may be faster, until `gap` is reached."""

    def __init__(self, problem: Problem, study: StoredStudy, sampler: PredictiveSampler) -> None:
        self._problem, self._study, self._sampler = problem, study, sampler

    def next(self, rows: Sequence[Trial], extra: Sequence[Trial] = ()) -> Proposal | None:
        """Return what to measure again, else the best candidate, or TPE's if the time model is not adequate."""
        acquisition = self._sampler.evaluate(self._study.optuna_study, extra=extra)
        bound = stated(acquisition.bound, self._problem.settings.gap)
        if acquisition.again is not None:
            choice = self._sampler.candidates[acquisition.again].choice
            return Proposal(choice, is_repeat=True, bound=bound)
        if not acquisition.is_adequate:
            return self._by_tpe(acquisition, extra)
        if acquisition.next is None:
            return None
        seconds = acquisition.predicted_seconds
        predicted_seconds = None if seconds is None else float(seconds[acquisition.next])
        choice = self._sampler.candidates[acquisition.next].choice
        return Proposal(choice, predicted_seconds, bound=bound)

    def baseline(self, rows: Sequence[Trial], answer: Choice) -> Choice | None:
        """Return the first baseline that is feasible."""
        baselines = {self._sampler.number_of(choice): choice for choice in self._problem.baseline_beside(answer)}
        self._sampler.predict(number for number in baselines if number is not None)
        feasible = self._sampler.evaluate(self._study.optuna_study, is_last=True).feasible
        return next((choice for number, choice in baselines.items() if number in feasible), None)

    def certificate(self, rows: Sequence[Trial], extra: Sequence[Trial] = ()) -> Certificate:
        """Return the bound after these measurements, and the configurations that were not measured."""
        acquisition = self._sampler.evaluate(self._study.optuna_study, extra=extra, is_last=True)
        counting = one_per_configuration(rows)
        choices = [*(row.choice for row in counting), *(one.choice for one in extra)]
        measured = {self._sampler.number_of(choice) for choice in choices} - {None}
        unmeasured = self._unmeasured(acquisition, measured)
        return Certificate(
            gap=self._problem.settings.gap,
            bound=acquisition.bound if acquisition.is_adequate else None,
            remaining_improvement=acquisition.remaining_improvement if acquisition.is_adequate else None,
            confidence=CONFIDENCE,
            residual_rms=acquisition.residual_rms,
            is_adequate=acquisition.is_adequate,
            num_configurations=len(self._sampler.candidates),
            num_measured=len(measured),
            num_failed=sum(row.outcome in FAILED for row in counting),
            unmeasured=tuple(unmeasured),
            seconds_measured=_seconds_of(rows),
            seconds_of_brute_force=_brute_force(counting, unmeasured),
            is_of_front=self._problem.settings.objectives == "pareto",
            noise=acquisition.posterior.noise if acquisition.is_adequate else None,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """How many configurations could not be predicted so far, a sentence for each cause."""
        return not_predicted_notes(self._sampler.candidates)

    def _by_tpe(self, acquisition: Acquisition, extra: Sequence[Trial]) -> Proposal | None:
        problem, study, sampler = self._problem, self._study, self._sampler
        while True:
            possible = [sampler.candidates[number].choice for number in sorted(acquisition.possible)]
            choice = choose(possible, problem.space, study.trials, study.taken, study.directions, "tpe", problem.seed)
            number = None if choice is None else sampler.number_of(choice)
            if choice is None or number is None or not sampler.needs_prediction(number):
                return None if choice is None else Proposal(choice)
            sampler.predict([number])
            acquisition = sampler.evaluate(study.optuna_study, extra=extra, is_last=True)

    def _unmeasured(self, acquisition: Acquisition, measured: Collection[int | None]) -> list[Unmeasured]:
        seconds, deviation = acquisition.predicted_seconds, acquisition.posterior.deviation_N
        incumbent = acquisition.incumbent
        improvement = None if incumbent is None else acquisition.posterior.probability_below(incumbent)
        unmeasured = []
        for number, candidate in enumerate(self._sampler.candidates):
            if number in measured:
                continue
            reason, cause = self._why_not_measured(number, acquisition)
            own_seconds = None if seconds is None or reason == NOT_PREDICTED else float(seconds[number])
            unmeasured.append(
                Unmeasured(
                    choice=candidate.choice,
                    predicted_peak_bytes=None if candidate.is_expected else candidate.predicted_bytes,
                    predicted_seconds_per_step=own_seconds,
                    reason=reason,
                    cause=cause,
                    predicted_deviation=float(deviation[number]),
                    probability_of_fit=float(acquisition.probability_of_fit[number]),
                    probability_of_improvement=None if improvement is None else float(improvement[number]),
                )
            )
        return unmeasured

    def _why_not_measured(self, number: int, acquisition: Acquisition) -> tuple[str, str | None]:
        """Return the reason why a candidate was not measured, and its cause where it has one."""
        candidate, rules = self._sampler.candidates[number], self._sampler.rules
        if number in acquisition.failing:
            name, value = acquisition.failing[number]
            return FAILING, f"{name}={written(value)}"
        if candidate.predicted_bytes is None:
            return NOT_PREDICTED, candidate.not_predicted
        if number not in acquisition.possible:
            is_close = candidate.predicted_bytes <= rules.budget_bytes
            cause = f"fits with a probability below fit_confidence={rules.fit_confidence:g}"
            return EXPECTED_UNFIT if candidate.is_expected else UNFIT, cause if is_close else None
        remaining = acquisition.remaining_improvement
        is_proven = acquisition.is_adequate and remaining is not None and remaining <= rules.gap
        return SLOWER if is_proven else NOT_TRIED, None


def make_proposer(problem: Problem, study: StoredStudy, sampler: PredictiveSampler | None) -> Proposer:
    """Return the predictive proposer with its sampler, or that of one of Optuna's samplers if `sampler` is None."""
    return OptunaProposer(problem, study) if sampler is None else PredictiveProposer(problem, study, sampler)


def _fitting(rows: Sequence[Trial]) -> list[Choice]:
    """Return the configurations that were measured to fit."""
    return [dict(row.choice) for row in one_per_configuration(rows) if row.fits]


def _seconds_of(rows: Sequence[Trial]) -> float:
    """Return the device time of trials."""
    return sum(row.metrics.get("seconds_total", 0.0) for row in rows)


def _brute_force(rows: Sequence[Trial], unmeasured: Sequence[Unmeasured]) -> float | None:
    """Return the device time of the whole space, if each unmeasured one takes as many steps as the median trial."""
    ratios = [
        row.metrics["seconds_total"] / row.metrics["seconds_per_step"]
        for row in rows
        if "seconds_per_step" in row.metrics
    ]
    predicted = [one.predicted_seconds_per_step for one in unmeasured]
    if not ratios or None in predicted:
        return None
    return _seconds_of(rows) + statistics.median(ratios) * sum(one for one in predicted if one is not None)
