"""Measurements in addition to the trials, such as those of a verification, count like trials."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest
from optuna.trial import TrialState, create_trial
from test_acquisition import BATCH, CANDIDATES, DISTRIBUTIONS, TOKENS, modelled, search

from pipeline.base.units import MIB
from pipeline.searching.acquisition import Rules
from pipeline.searching.certificate import UNFIT
from pipeline.searching.experiment_problem import ExperimentProblem
from pipeline.searching.proposals import PredictiveProposer
from pipeline.searching.sampler import PredictiveSampler
from pipeline.searching.study import StoredStudy
from pipeline.searching.trials import ANSWER, Trial

RULES = Rules(budget_bytes=200 * MIB)
SECONDS = modelled()


def speed(number: int) -> float:
    return BATCH * TOKENS / SECONDS(CANDIDATES[number])


def measurement(number: int, factor: float = 1.0, outcome: str = "ok", peak: float | None = None) -> Trial:
    has_ended = outcome in ("ok", "over_budget")
    metrics = {"tokens_per_second": factor * speed(number)} if has_ended else {}
    return Trial(
        number=0,
        source=ANSWER,
        choice=CANDIDATES[number].choice,
        outcome=outcome,
        fits=outcome == "ok",
        metrics=metrics if peak is None else {**metrics, "peak_allocated_mib": peak / MIB},
    )


Finished = tuple[PredictiveSampler, optuna.Study, list[int]]


@pytest.fixture(scope="module")
def finished() -> Finished:
    """Return a search that has reached its bound."""
    study, sampler = optuna.create_study(direction="maximize"), PredictiveSampler(CANDIDATES, RULES)
    numbers, _ = search(SECONDS, RULES)
    for number in numbers:
        study.add_trial(
            create_trial(params=CANDIDATES[number].choice, distributions=DISTRIBUTIONS, value=speed(number))
        )
    assert sampler.evaluate(study).next is None
    return sampler, study, numbers


def test_a_second_measurement_enters_as_the_geometric_mean(finished: Finished) -> None:
    sampler, study, numbers = finished
    before = sampler._measurements(study.trials, maximize=True)
    after = sampler._with_extra(before, [measurement(numbers[0], 0.96), measurement(numbers[1], peak=7.0)])
    assert after.log_seconds[numbers[0]] == pytest.approx(before.log_seconds[numbers[0]] - math.log(0.96) / 2)
    assert after.log_seconds[numbers[1]] == pytest.approx(before.log_seconds[numbers[1]])
    assert after.peak_bytes[numbers[1]] == 7.0
    num_runs = {number: len(runs) for number, runs in after.counting_runs.items()}
    assert num_runs == dict.fromkeys(before.runs, 1) | {numbers[0]: 2, numbers[1]: 2}
    assert sampler._with_extra(before, ()) == before


def test_a_measurement_of_another_configuration_counts_as_a_trial(finished: Finished) -> None:
    sampler, study, numbers = finished
    plain = next(n for n in sampler.evaluate(study).feasible if n not in numbers)
    measured = sampler._with_extra(sampler._measurements(study.trials, maximize=True), [measurement(plain)])
    assert measured.log_seconds[plain] == pytest.approx(-math.log(speed(plain))) and plain in measured.taken


def test_the_search_goes_on_where_a_measurement_contradicts_its_bound(finished: Finished) -> None:
    sampler, study, numbers = finished
    answer = max(numbers, key=speed)
    plain = next(n for n in sorted(sampler.evaluate(study).feasible) if n not in numbers)
    contradicting = measurement(plain, 1.11 * speed(answer) / speed(plain))
    after = sampler.evaluate(study, extra=[contradicting])
    assert after.next is not None and after.next not in (*numbers, plain)
    assert after.remaining_improvement is not None and after.remaining_improvement > RULES.gap


@pytest.mark.parametrize("outcome", ["out_of_memory", "over_budget", "crashed"])
def test_a_refuted_configuration_is_not_what_others_have_to_beat(finished: Finished, outcome: str) -> None:
    sampler, study, numbers = finished
    answer = max(numbers, key=speed)
    before = sampler._measurements(study.trials, maximize=True)
    after = sampler._with_extra(before, [measurement(answer, outcome=outcome)])
    assert answer in after.taken and (answer in after.over_budget or answer not in after.log_seconds)
    assert sampler.evaluate(study, extra=[measurement(n, outcome=outcome) for n in numbers]).bound is None


def test_the_certificate_counts_configurations_that_only_the_verification_measured() -> None:
    stored = StoredStudy("sqlite:///:memory:", "test", ("maximize",), {})
    sampler = PredictiveSampler(CANDIDATES, RULES)
    made: Any = SimpleNamespace(settings=SimpleNamespace(gap=0.01, objectives="throughput"))
    gone = replace(measurement(1), choice={**CANDIDATES[1].choice, "precision": "of a package that is gone"})
    proposer = PredictiveProposer(cast(ExperimentProblem, made), stored, sampler)
    certificate = proposer.certificate((), [measurement(0), gone])
    assert certificate.num_measured == 1 and len(certificate.unmeasured) == len(CANDIDATES) - 1


def test_one_that_fits_too_closely_says_so() -> None:
    """Predicted within the budget, but not as surely as `fit_confidence` asks for."""
    close, budget_bytes = CANDIDATES[0], int((CANDIDATES[0].predicted_bytes or 0) * 1.0001)
    larger = next(one for one in CANDIDATES if (one.predicted_bytes or 0) > 1.1 * budget_bytes)
    smaller = next(one for one in CANDIDATES if (one.predicted_bytes or 0) < 0.9 * budget_bytes)
    stored = StoredStudy("sqlite:///:memory:", "close", ("maximize",), {})
    made: Any = SimpleNamespace(settings=SimpleNamespace(gap=0.01, objectives="throughput"))
    sampler = PredictiveSampler([close, larger, smaller], Rules(budget_bytes=budget_bytes))
    certificate = PredictiveProposer(cast(ExperimentProblem, made), stored, sampler).certificate(())
    cause_of = {str(one.choice): one.cause for one in certificate.unmeasured if one.reason == UNFIT}
    assert cause_of == {
        str(close.choice): "fits with a probability below fit_confidence=0.95",
        str(larger.choice): None,
    }


def test_the_bound_of_a_proposal_is_the_stated_one(finished: Finished) -> None:
    """It is not below the setting `gap`, in the terminal as everywhere."""
    sampler, study, numbers = finished
    begun: Any = optuna.create_study(direction="maximize")
    begun.add_trials([trial for trial in study.trials if trial.params in [CANDIDATES[n].choice for n in numbers[:4]]])
    stored: Any = SimpleNamespace(optuna_study=begun)
    bound = sampler.evaluate(begun).bound
    assert bound is not None and 0 < bound < 0.9
    for gap in (0.9, bound / 2):
        made: Any = SimpleNamespace(settings=SimpleNamespace(gap=gap))
        proposal = PredictiveProposer(made, stored, sampler).next(())
        assert proposal is not None and proposal.bound == max(bound, gap)


def test_a_run_that_did_not_complete_stays_known_beside_those_of_verifications(finished: Finished) -> None:
    sampler, study, numbers = finished
    answer = max(numbers, key=speed)
    made = optuna.create_study(direction="maximize")
    made.add_trials(study.trials)
    shared = {"params": CANDIDATES[answer].choice, "distributions": DISTRIBUTIONS}
    made.add_trial(create_trial(state=TrialState.FAIL, **shared))
    measured = sampler._measurements(made.trials, maximize=True)
    for extra in ([], [measurement(answer)], [measurement(answer)] * 3):
        known = sampler._with_extra(measured, extra)
        assert answer in known.with_failed_run and answer in known.repeated and answer in known.fitting
