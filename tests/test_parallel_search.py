"""The predictive search with several workers: what runs counts as measured in a choice, and as unknown in the bound."""

import math
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from test_acquisition import (
    BATCH,
    CANDIDATES,
    DISTRIBUTIONS,
    POLICIES,
    PRECISIONS,
    TOKENS,
    Seconds,
    measured,
    modelled,
)

from pipeline.base.by_key import grouped
from pipeline.base.units import MIB
from pipeline.searching.acquisition import MOST_UNFIT, Acquisition, Rules, evaluate
from pipeline.searching.measurements import Measurements
from pipeline.searching.sampler import PredictiveSampler
from pipeline.searching.trial_record import CONSTRAINT

RULES = Rules(budget_bytes=200 * MIB)
NUMBERS = st.lists(st.sampled_from(range(len(CANDIDATES))), max_size=16, unique=True)


def running(known: Measurements, *numbers: int) -> Measurements:
    return replace(known, running=frozenset(numbers))


def started(known: Measurements, num_workers: int, rules: Rules = RULES, candidates: list = CANDIDATES) -> list[int]:
    """Return what so many workers start one after another before any of them has a result."""
    numbers: list[int] = []
    while len(numbers) < num_workers:
        following = evaluate(candidates, running(known, *numbers), rules).next
        if following is None:
            break
        numbers.append(following)
    return numbers


@settings(max_examples=25)
@given(ended=NUMBERS, others=NUMBERS, whole_front=st.booleans())
def test_what_runs_is_not_proposed_and_stays_a_rival_in_the_bound(
    ended: list[int], others: list[int], whole_front: bool
) -> None:
    """Other trials of measured configurations, which are repeats, may run as well."""
    known, rules = measured(modelled(), ended, RULES.budget_bytes), replace(RULES, whole_front=whole_front)
    alone, beside = evaluate(CANDIDATES, known, rules), evaluate(CANDIDATES, running(known, *others), rules)
    assert not {beside.next, beside.best_remaining} & {*ended, *others}
    assert beside.again is None or beside.again not in others
    assert beside.bound == alone.bound and beside.remaining_improvement == alone.remaining_improvement
    if beside.bound is not None:
        left = alone.feasible - known.taken
        assert beside.is_waiting <= bool(left & set(others)) or len(known.runs) < 4


@settings(max_examples=10)
@given(ended=NUMBERS, num_workers=st.integers(2, 16))
def test_workers_that_start_together_measure_different_configurations_that_fit(
    ended: list[int], num_workers: int
) -> None:
    known = measured(modelled(), ended, RULES.budget_bytes)
    numbers = started(known, num_workers)
    assert len(set(numbers)) == len(numbers) and not set(numbers) & known.taken
    assert all((CANDIDATES[number].predicted_bytes or 0) <= RULES.budget_bytes for number in numbers)


@pytest.mark.parametrize(("num_workers", "expected"), [(4, {*PRECISIONS}), (16, {*PRECISIONS, *POLICIES})])
def test_the_first_trials_of_several_workers_are_spread_over_the_space(num_workers: int, expected: set[str]) -> None:
    """Some of many workers wait: once so much runs, what else there is may be known from its results."""
    nothing = measured(modelled(), [], RULES.budget_bytes)
    numbers = started(nothing, num_workers)
    assert 0.75 * num_workers <= len(numbers) <= num_workers and numbers[:1] == started(nothing, 1)
    assert expected <= {value for number in numbers for value in CANDIDATES[number].choice.values()}


def test_a_worker_waits_where_only_a_running_trial_may_be_worth_its_time() -> None:
    known = measured(modelled(), [0, 1, 7, 12, 14, 19, 24, 30], RULES.budget_bytes)
    numbers = started(known, len(CANDIDATES))
    assert numbers and not evaluate(CANDIDATES, known, RULES).is_waiting
    beside = evaluate(CANDIDATES, running(known, *numbers), RULES)
    assert beside.next is None and beside.is_waiting and beside.best_remaining is not None
    assert beside.remaining_improvement is not None and beside.remaining_improvement > RULES.gap
    ended = measured(modelled(), [*known.runs, *numbers], RULES.budget_bytes)
    assert not evaluate(CANDIDATES, ended, RULES).is_waiting


def test_two_workers_do_not_repeat_the_same_configuration() -> None:
    known = measured(modelled(), [0, 1, 7, 12, 14, 19, 24, 30], RULES.budget_bytes)
    fastest, slowed = known.incumbent, 12
    known = replace(known, runs={**known.runs, slowed: [known.log_seconds[slowed] + math.log(1.4)]})
    again = [evaluate(CANDIDATES, running(known, *numbers), RULES).again for numbers in ([], [fastest])]
    assert again == [fastest, slowed]
    assert evaluate(CANDIDATES, running(known, fastest, slowed), RULES).again is None


def test_few_trials_that_may_not_fit_run_at_the_same_time() -> None:
    unpredicted = [replace(one, predicted_bytes=None) for one in CANDIDATES]
    nothing = measured(modelled(), [], RULES.budget_bytes)
    numbers = started(nothing, 16, candidates=unpredicted)
    assert len(numbers) * 0.5 == MOST_UNFIT
    assert evaluate(unpredicted, running(nothing, *numbers), RULES).is_waiting


def ask(study: optuna.Study, acquisition: Acquisition) -> optuna.Trial | None:
    """Start the trial that a worker would start; None if it has to wait."""
    number = acquisition.next if acquisition.again is None else acquisition.again
    if number is None:
        return None
    study.enqueue_trial(CANDIDATES[number].choice)
    return study.ask(DISTRIBUTIONS)


def searched(num_workers: int, seconds: Seconds, random: np.random.Generator) -> tuple[optuna.Study, Acquisition]:
    """Return the study of so many workers, whose trials take a random time and of which a few fail, and its end."""
    sampler = PredictiveSampler(CANDIDATES, RULES)
    study, now, order = optuna.create_study(direction="maximize"), 0.0, 0
    trials: list[tuple[float, int, optuna.Trial]] = []
    while True:
        acquisition = sampler.evaluate(study)
        trial = ask(study, acquisition) if len(trials) < num_workers else None
        if trial is not None:
            heappush(trials, (now + random.uniform(1, 5), order := order + 1, trial))
        elif trials:
            now, _, trial = heappop(trials)
            one = next(one for one in CANDIDATES if one.choice == trial.params)
            if random.uniform() < 0.05:
                study.tell(trial, state=TrialState.FAIL)
                continue
            trial.set_constraint(CONSTRAINT, (one.predicted_bytes or 0) - RULES.budget_bytes)
            study.tell(trial, BATCH * TOKENS / seconds(one) * math.exp(0.01 * random.standard_normal()))
        else:
            return study, acquisition


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_workers", [2, 8, 64])
@settings(max_examples=4, derandomize=True)
@given(fixed=st.floats(0, 4), speedup=st.floats(0.3, 1.5), seed=st.integers(0, 99))
def test_a_search_of_many_workers_measures_nothing_twice_and_finds_the_best(
    num_workers: int, fixed: float, speedup: float, seed: int
) -> None:
    """A configuration has a further trial only if the one before has ended, as a repeat."""
    seconds = modelled(fixed, speedup)
    study, acquisition = searched(num_workers, seconds, np.random.default_rng(seed))
    assert not acquisition.is_waiting and not study.get_trials(states=(TrialState.RUNNING, TrialState.WAITING))
    ends = grouped((tuple(sorted(trial.params.items())), trial) for trial in study.trials)
    for trials in ends.values():
        assert all(before.datetime_complete <= after.datetime_start for before, after in pairwise(trials))
    assert acquisition.remaining_improvement is not None and acquisition.remaining_improvement <= RULES.gap
    failed = [one.params for one in study.trials if one.state is TrialState.FAIL]
    fitting = [one for one in CANDIDATES if (one.predicted_bytes or 0) <= RULES.budget_bytes]
    best = min(seconds(one) for one in fitting if one.choice not in failed)
    answer = next(one for one in CANDIDATES if one.choice == study.best_params)
    assert acquisition.bound is not None and 1 - best / seconds(answer) <= max(acquisition.bound, RULES.gap)
