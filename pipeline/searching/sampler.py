"""The search's own sampler, for any Optuna study: it enumerates, predicts, and proposes what promises most."""

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from pipeline.base.results import Outcome
from pipeline.searching.acquisition import Measured, Outlook, Rules, look_ahead
from pipeline.searching.candidates import Candidate
from pipeline.searching.judge import CONSTRAINT, OUTCOME

CANDIDATE = "candidate"
"""Attribute of a trial: the number of what was proposed, before its parameters are suggested."""


class NothingLeftError(RuntimeError):
    """Every configuration that is predicted to fit is measured, or being measured."""


class PredictiveSampler(BaseSampler):  # type: ignore[misc]
    """Proposes configurations of a finite space that are predicted to fit, the most promising first, none twice.

    The study's first objective is tokens per second (to maximize) or seconds per optimizer step (to minimize). A trial
    tells its peak by the constraint `bytes_over_budget` (`trial.set_constraint`); one that ran out of memory is pruned
    with that constraint above zero. In `study.optimize` the study stops as soon as nothing left is worth measuring.
    """

    def __init__(self, candidates: Sequence[Candidate], rules: Rules) -> None:
        """Take every configuration of the space, with what is known of it, and what the search wants.

        Raises:
            ValueError: there is no candidate.

        """
        if not candidates:
            raise ValueError("a search needs at least one candidate, and there is none; add values to the space")
        self.candidates, self.rules = tuple(candidates), rules
        self._numbers = {_key(candidate.choice): number for number, candidate in enumerate(candidates)}
        self._distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(list(dict.fromkeys(candidate.choice[name] for candidate in candidates)))
            for name in candidates[0].choice
        }

    @property
    def best_first(self) -> int | None:
        """Return the number of the first candidate to measure, in an empty study; None where none may fit."""
        return look_ahead(self.candidates, self._measured([], maximize=True), self.rules).next

    def outlook(
        self, study: Study, instead: FrozenTrial | None = None, again: Mapping[int, float] | None = None
    ) -> Outlook:
        """Return what the candidates promise after the trials of `study`, those of other workers included.

        `instead` replaces the trial of its number; `again` has the tokens per second, by number, of those candidates
        that were measured once more, from both measurements.
        """
        trials = list(study.get_trials(deepcopy=False))
        if instead is not None:
            trials[instead.number] = instead
        maximize = study.directions[0] == StudyDirection.MAXIMIZE
        measured = self._measured(trials, maximize)
        seconds = {number: -math.log(value) for number, value in (again or {}).items()}
        return look_ahead(
            self.candidates, replace(measured, log_seconds={**measured.log_seconds, **seconds}), self.rules
        )

    def number_of(self, choice: Mapping[str, Any]) -> int:
        """Return the number of a configuration."""
        return self._numbers[_key(choice)]

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all dimensions."""
        return self._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the configuration that promises most, though what is left may not be worth measuring.

        Raises:
            NothingLeftError: no configuration is left that is predicted to fit.

        """
        while True:
            outlook = self.outlook(study)
            number = outlook.best_left
            if number is None:
                raise NothingLeftError(
                    "every configuration that is predicted to fit is measured already, or is running"
                )
            study._storage.set_trial_system_attr(trial._trial_id, CANDIDATE, number)
            if not self._is_elsewhere(study, trial, number):
                return dict(self.candidates[number].choice)
            study._storage.set_trial_system_attr(trial._trial_id, CANDIDATE, None)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Refuse: every dimension is known from the start.

        Raises:
            ValueError: always.

        """
        known = ", ".join(self._distributions)
        raise ValueError(
            f"every parameter must be a dimension of the candidates ({known}) with all of its values, and {param_name} "
            "is not; suggest those"
        )

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Stop `study.optimize` where nothing left is worth measuring."""
        ended = copy.copy(trial)  # the storage does not know yet how it ended
        ended.state, ended.values = state, list(values) if values is not None else None
        if self.outlook(study, instead=ended).next is None:
            with contextlib.suppress(RuntimeError):  # ask-and-tell has no loop to stop
                study.stop()

    def _is_elsewhere(self, study: Study, trial: FrozenTrial, number: int) -> bool:
        """Whether another worker has chosen the same in the meantime, and may have finished it."""
        others = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        return any(self._number(other) == number and not _is_interrupted(other) for other in others)

    def _measured(self, trials: Sequence[FrozenTrial], maximize: bool) -> Measured:
        seconds: dict[int, float] = {}
        peaks: dict[int, float] = {}
        over, failed, running, again = set[int](), set[int](), set[int](), set[int]()
        for trial in trials:
            number = self._number(trial)
            if number is None or _is_interrupted(trial):
                continue
            if number in seconds:
                again.add(number)
            excess = trial.constraints.get(CONSTRAINT)
            if excess is not None:
                peak = self.rules.budget_bytes + excess
                peaks[number] = max(peak, peaks.get(number, peak))
            if excess is not None and excess > 0:
                over.add(number)
            if trial.state is TrialState.COMPLETE:
                log_seconds = _log_seconds(trial.values[0], self.candidates[number], maximize)
                seconds[number] = min(log_seconds, seconds.get(number, log_seconds))
            elif trial.state in (TrialState.RUNNING, TrialState.WAITING):
                running.add(number)
            elif excess is None and number not in seconds:
                failed.add(number)
        return Measured(
            log_seconds=seconds,
            peak_bytes=peaks,
            over_budget=frozenset(over),
            failed=frozenset(failed),
            running=frozenset(running),
            again=frozenset(again),
        )

    def _number(self, trial: FrozenTrial) -> int | None:
        """Return which candidate a trial is of."""
        known = self._numbers.get(_key(trial.params))
        stored = trial.system_attrs.get(CANDIDATE)
        return known if known is not None or stored is None else int(stored)


def _is_interrupted(trial: FrozenTrial) -> bool:
    """Whether a trial was given up, so that its configuration is free again."""
    return bool(trial.user_attrs.get(OUTCOME) == Outcome.INTERRUPTED)


def _key(params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items(), key=lambda pair: pair[0]))


def _log_seconds(value: float, candidate: Candidate, maximize: bool) -> float:
    """Return the logarithm of the seconds per token that a trial's value stands for."""
    return -math.log(value) if maximize else math.log(value / candidate.num_tokens)
