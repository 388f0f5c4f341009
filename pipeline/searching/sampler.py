"""The predictive sampler: it proposes the best candidate of a space, and predicts on the way.

A search asks evaluate() for the candidates on all trials. The methods of Optuna's BaseSampler serve a study of the
user's own, which asks for one trial after the other.
"""

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from pipeline.base.results import Outcome
from pipeline.config.space import key_of
from pipeline.planning.expectation import Expectation
from pipeline.searching.acquisition import Acquisition, Rules, evaluate
from pipeline.searching.candidates import Candidate, known_peaks, with_work_of_alike
from pipeline.searching.measurements import Measurements
from pipeline.searching.time_model import TimeModel
from pipeline.searching.trial_record import CONSTRAINT, NUM_EARLIER_RUNS, OUTCOME, is_known
from pipeline.searching.trials import TOO_LARGE, Trial

Predict = Callable[[Sequence[Candidate]], Sequence[Candidate]]
"""Returns candidates with their predictions, in their order."""
CANDIDATE = "candidate"
"""Attribute of a trial: the index of the proposed candidate, stored before its parameters are suggested."""


def expectation_of(candidates: Sequence[Candidate]) -> Expectation:
    """Return what is expected of candidates."""
    return Expectation([one.choice for one in candidates], [one.micro_batch_size for one in candidates])


def with_expectations(candidates: Sequence[Candidate], budget_bytes: int, kind: str) -> list[Candidate]:
    """Return the candidates; those that are not predicted yet have the expected peak and work.

    The work is that of a candidate that is alike, as much more or less as its time is expected to be, with the prior
    costs of the device's kind.
    """
    candidates = with_work_of_alike(candidates)
    peaks = {number: peak_bytes / budget_bytes for peak_bytes, number in known_peaks(candidates)}
    if not peaks:
        return candidates
    expectation, model = expectation_of(candidates), TimeModel(candidates, kind)
    prior_N, _ = model.evaluate(model.prior[0])
    expected_N = expectation.of_all({number: prior_N[number] for number in peaks})
    more_N, peaks_N = np.exp(expected_N - prior_N), expectation.of_all(peaks)

    def with_expectation(candidate: Candidate, more: float, peak: float) -> Candidate:
        if not candidate.is_expected:
            return candidate
        peak_bytes, share = max(1, int(peak * budget_bytes)), 1.0 if candidate.is_work_known else more
        return replace(
            candidate,
            pass_work=candidate.pass_work * share,
            update_work=candidate.update_work * share,
            predicted_bytes=peak_bytes,
        )

    return list(map(with_expectation, candidates, more_N.tolist(), peaks_N.tolist()))


class NothingLeftError(RuntimeError):
    """Every configuration that is predicted to fit has been measured, or is being measured."""


class PredictiveSampler(BaseSampler):  # type: ignore[misc]
    """Proposes the best configuration of a finite space that is predicted to fit, and none twice.

    The study's first objective is tokens per second (to maximize) or seconds per optimizer step (to minimize). The
    objective function reports the peak with `trial.set_constraint("bytes_over_budget", peak_bytes - budget_bytes)`. A
    trial that ran out of memory is pruned, with that constraint above zero as a lower bound. `study.optimize` stops
    as soon as no measurement is worth its time.
    """

    def __init__(
        self, candidates: Sequence[Candidate], rules: Rules, predict: Predict | None = None, num_at_once: int = 1
    ) -> None:
        """Take all configurations of the space and the goal of the search.

        Those that are not predicted yet are predicted by `predict` once they are to be proposed, the most promising
        `num_at_once` together.

        Raises:
            ValueError: there is no candidate.

        """
        if not candidates:
            raise ValueError("a search needs at least one candidate, and there is none; add values to the space")
        self.candidates, self.rules = tuple(candidates), rules
        self._predict, self._num_at_once = predict, num_at_once
        self._lock = threading.RLock()
        self._numbers = {key_of(candidate.choice): number for number, candidate in enumerate(candidates)}
        self._distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(list(dict.fromkeys(candidate.choice[name] for candidate in candidates)))
            for name in candidates[0].choice
        }

    @property
    def first(self) -> int | None:
        """Return the index of the candidate to measure first in an empty study; None if nothing can fit."""
        return self.evaluate_measured(self._measurements([], maximize=True)).next

    def predict(self, numbers: Iterable[int]) -> None:
        """Predict those of these candidates that are not predicted yet."""
        with self._lock:
            expected = [number for number in numbers if self.candidates[number].is_expected]
            if not expected or self._predict is None:
                return
            predicted = self._predict([self.candidates[number] for number in expected])
            known = {**dict(enumerate(self.candidates)), **dict(zip(expected, predicted, strict=True))}
            self.candidates = tuple(with_expectations([*known.values()], self.rules.budget_bytes, self.rules.kind))

    def predict_leanest(self) -> bool:
        """Predict those that are expected to need the least memory; return whether one that may was left."""
        expected = {number: one.predicted_bytes or 0 for number, one in enumerate(self.candidates) if one.is_expected}
        peaks = {number: float(peak_bytes) for peak_bytes, number in known_peaks(self.candidates)}
        accumulates = [one.num_passes > 1 for one in self.candidates]
        num_tried = len(self.candidates) - len(expected)
        wanted = expectation_of(self.candidates).may_be_leanest(peaks, accumulates, num_tried) & expected.keys()
        self.predict(sorted(wanted, key=lambda number: (expected[number], number))[: self._num_at_once])
        return bool(wanted)

    def evaluate(
        self,
        study: Study,
        instead: FrozenTrial | None = None,
        extra: Sequence[Trial] = (),
        *,
        is_last: bool = False,
    ) -> Acquisition:
        """Return the candidates evaluated on all trials of `study`, including those of other workers.

        `instead` replaces the stored trial of its number. `extra` has further measurements of any configurations, such
        as those of a verification: they are runs of a configuration like its trial, and one that did not fit or did not
        end is not a rival to beat. What is proposed is predicted first, unless the evaluation `is_last`.
        """
        trials = list(study.get_trials(deepcopy=False))
        if instead is not None:
            trials[instead.number] = instead
        maximize = study.directions[0] == StudyDirection.MAXIMIZE
        return self.evaluate_measured(self._with_extra(self._measurements(trials, maximize), extra), is_last=is_last)

    def evaluate_measured(self, measured: Measurements, *, is_last: bool = False) -> Acquisition:
        """Return the candidates evaluated once what was measured is predicted and, unless `is_last`, the next one."""
        with self._lock:
            self.predict(measured.taken)
            while True:
                acquisition = evaluate(self.candidates, measured, self.rules)
                if is_last or acquisition.next is None or not self.needs_prediction(acquisition.next):
                    return acquisition
                self._predict_promising(acquisition.next, acquisition, measured)

    def needs_prediction(self, number: int) -> bool:
        """Return whether a candidate is to be predicted before it is measured."""
        return self.candidates[number].is_expected and self._predict is not None

    def _predict_promising(self, wanted: int, acquisition: Acquisition, measured: Measurements) -> None:
        """Predict a candidate, and with it those that are expected to be the fastest of what may fit."""
        free = [n for n in acquisition.possible - measured.taken if n != wanted and self.needs_prediction(n)]
        free.sort(key=acquisition.posterior.mean_N.__getitem__)
        self.predict([wanted, *free][: self._num_at_once])

    def number_of(self, choice: Mapping[str, Any]) -> int | None:
        """Return the index of a configuration; None if it is not in the space, as one that had another package."""
        return self._numbers.get(key_of(choice))

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all dimensions."""
        return self._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the best configuration that is left, even if no measurement is worth its time.

        Raises:
            NothingLeftError: no configuration is left that is predicted to fit.

        """
        while True:
            number = self.evaluate(study).best_remaining
            if number is None:
                raise NothingLeftError("every configuration that is predicted to fit is measured, or being measured")
            if self.needs_prediction(number):
                self.predict([number])
                continue
            study._storage.set_trial_system_attr(trial._trial_id, CANDIDATE, number)
            if not self._is_taken(study, trial, number):
                return dict(self.candidates[number].choice)
            study._storage.set_trial_system_attr(trial._trial_id, CANDIDATE, None)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Refuse a parameter that is not a dimension of the candidates.

        Raises:
            ValueError: always.

        """
        known = ", ".join(self._distributions)
        raise ValueError(
            f"every parameter must be a dimension of the candidates ({known}) with all of its values, and {param_name} "
            "is not; suggest those"
        )

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Stop `study.optimize` if no further measurement is worth its time."""
        ended = copy.copy(trial)  # the storage does not have its state and values yet
        ended.state, ended.values = state, list(values) if values is not None else None
        acquisition = self.evaluate(study, instead=ended)
        if acquisition.next is None and not acquisition.is_waiting:
            with contextlib.suppress(RuntimeError):  # ask-and-tell has no loop to stop
                study.stop()

    def _is_taken(self, study: Study, trial: FrozenTrial, number: int) -> bool:
        """Whether another worker has started or finished the same configuration in the meantime."""
        others = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        return any(self._number(other) == number and not _is_interrupted(other) for other in others)

    def _measurements(self, trials: Sequence[FrozenTrial], maximize: bool) -> Measurements:
        """Return the measurements of the trials; of two of one configuration, the larger peak."""
        runs: dict[int, list[float]] = {}
        peaks: dict[int, float] = {}
        bounds: dict[int, float] = {}
        over, failed, with_failed_run, running = set[int](), set[int](), set[int](), set[int]()
        for trial in trials:
            number = self._number(trial)
            if number is None or _is_interrupted(trial):
                continue
            excess = trial.constraints.get(CONSTRAINT)
            if excess is not None:
                known = bounds if trial.state is TrialState.PRUNED and excess > 0 else peaks
                known[number] = max(self.rules.budget_bytes + excess, known.get(number, 0.0))
            if excess is not None and excess > 0:
                over.add(number)
            if trial.state is TrialState.COMPLETE:
                runs.setdefault(number, []).append(_log_seconds(trial.values[0], self.candidates[number], maximize))
            elif trial.state in (TrialState.RUNNING, TrialState.WAITING):
                running.add(number)
            else:
                with_failed_run.add(number)
                if excess is None and number not in runs:
                    failed.add(number)
        return Measurements(
            runs=runs,
            peak_bytes=peaks,
            peak_lower_bounds=bounds,
            over_budget=frozenset(over),
            failed=frozenset(failed),
            running=frozenset(running),
            with_failed_run=frozenset(with_failed_run),
        )

    def _with_extra(self, measured: Measurements, extra: Sequence[Trial]) -> Measurements:
        """Return the measurements with further ones of configurations, measured or not."""
        runs = {number: list(known) for number, known in measured.runs.items()}
        peaks = dict(measured.peak_bytes)
        over, refuted = set(measured.over_budget), set[int]()
        for one in extra:
            number = self.number_of(one.choice)
            if number is None:
                continue
            if one.peak_bytes is not None and one.outcome != Outcome.OUT_OF_MEMORY:
                peaks[number] = max(one.peak_bytes, peaks.get(number, 0.0))
            if one.outcome in TOO_LARGE:
                over.add(number)
            if one.tokens_per_second is not None:
                runs.setdefault(number, []).append(-math.log(one.tokens_per_second))
            elif one.outcome not in TOO_LARGE:
                refuted.add(number)
        return replace(
            measured,
            runs={number: known for number, known in runs.items() if number not in refuted},
            peak_bytes=peaks,
            over_budget=frozenset(over),
            failed=measured.failed | refuted,
        )

    def _number(self, trial: FrozenTrial) -> int | None:
        """Return the index of a trial's configuration; None if it is not in the space."""
        known = self._numbers.get(key_of(trial.params))
        stored = trial.system_attrs.get(CANDIDATE)
        return known if known is not None or stored is None else int(stored)


def _is_interrupted(trial: FrozenTrial) -> bool:
    """Whether a trial was interrupted, or its worker died, so that its configuration may be proposed again."""
    if NUM_EARLIER_RUNS in trial.user_attrs:
        return trial.state.is_finished() and not is_known(trial)
    return bool(trial.user_attrs.get(OUTCOME) == Outcome.INTERRUPTED)


def _log_seconds(value: float, candidate: Candidate, maximize: bool) -> float:
    """Return the logarithm of the seconds per token that a trial's value stands for."""
    return -math.log(value) if maximize else math.log(value / candidate.num_tokens)
