"""Out of memory is a lower bound of a peak: it never makes a configuration more likely to fit."""

import math
from dataclasses import replace

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState, create_trial
from test_acquisition import BATCH, CANDIDATES, DISTRIBUTIONS, TOKENS

from pipeline.base.units import MIB
from pipeline.searching import memory_model
from pipeline.searching.acquisition import Rules
from pipeline.searching.candidates import Candidate
from pipeline.searching.gaussian import Gaussian
from pipeline.searching.sampler import PredictiveSampler
from pipeline.searching.trial_record import CONSTRAINT

LARGE = max(range(len(CANDIDATES)), key=lambda number: CANDIDATES[number].predicted_bytes or 0)
PEAK = CANDIDATES[LARGE].predicted_bytes or 0


def group(candidate: Candidate) -> dict[str, object]:
    return {**candidate.choice, "micro_batch_size": None}


@settings(max_examples=60)
@given(number=st.integers(0, len(CANDIDATES) - 1), ratio=st.floats(0.8, 1.3), budget=st.integers(30, 600))
def test_a_lower_bound_makes_no_configuration_more_likely_to_fit(number: int, ratio: float, budget: int) -> None:
    bounds = {number: ratio * (CANDIDATES[number].predicted_bytes or 0)}
    before = memory_model.probability_of_fit(CANDIDATES, {}, budget * MIB, "cuda")
    after = memory_model.probability_of_fit(CANDIDATES, {}, budget * MIB, "cuda", bounds)
    assert (after <= before).all()


def test_a_lower_bound_below_the_predicted_peak_does_not_lower_the_predictions() -> None:
    """Out of memory at 97.6 % of the predicted peak, as where 10.05 GiB were reached and 10.30 predicted."""
    bound = {LARGE: 0.976 * PEAK}
    censored = memory_model.posterior(CANDIDATES, {}, int(0.97 * PEAK), "cuda", bound)
    assert (censored.mean_N >= 0).all()
    exact = memory_model.posterior(CANDIDATES, bound, PEAK, "cuda")
    assert (exact.mean_N < 0).all(), "a peak that was measured does lower them"


def test_what_was_predicted_to_fit_and_did_not_raises_the_predictions() -> None:
    """The allocator gives back cached memory near a cap, so a configuration may fit below its predicted peak."""
    edge = CANDIDATES[LARGE]
    candidates = [*CANDIDATES]
    candidates[LARGE] = replace(edge, smallest_budget_bytes=math.ceil(0.9 * PEAK))
    budget, bound = int(0.95 * PEAK), {LARGE: 0.96 * PEAK}
    refuted = memory_model.posterior(candidates, {}, budget, "cuda", bound)
    expected = memory_model.posterior(CANDIDATES, {}, budget, "cuda", bound)
    assert refuted.mean_N[LARGE] > expected.mean_N[LARGE] > 0


def test_a_run_that_fits_because_cached_memory_is_released_does_not_lower_the_predictions() -> None:
    """Its peak is at most the budget, and the predicted one is without a budget."""
    peaks, budget = {LARGE: 0.77 * PEAK}, int(0.85 * PEAK)
    assert (memory_model.posterior(CANDIDATES, peaks, budget, "cuda").mean_N == 0).all()
    assert (memory_model.posterior(CANDIDATES, peaks, budget, "cpu").mean_N < 0).all(), "a CPU has no cap"


def test_the_mean_is_that_of_a_truncated_gaussian() -> None:
    from scipy.stats import norm  # which takes a second

    root = np.linalg.cholesky(np.array([[4.0, 1.0], [1.0, 2.0]]))
    prior = Gaussian.prior(np.array([0.0, 1.0]), root, np.ones(2), np.zeros(2))
    for bound in (-5.0, 0.0, 3.0, 60.0):
        posterior = prior.condition_above({0: bound}, 0.0)
        truncated = 2 * norm.pdf(bound / 2) / norm.sf(bound / 2) if bound < 60 else 60.066
        assert posterior.mean_N[0] == pytest.approx(truncated, rel=1e-3, abs=1e-9)
        assert posterior.mean_N[1] == pytest.approx(1 + truncated / 4, rel=1e-3)
        assert (posterior.variance_N == prior.variance_N).all()


def test_a_trial_that_ran_out_of_memory_bounds_its_peak() -> None:
    budget = int(0.97 * PEAK)
    sampler = PredictiveSampler(CANDIDATES, Rules(budget_bytes=budget, kind="cuda"))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    trial = create_trial(
        state=TrialState.PRUNED,
        params=CANDIDATES[LARGE].choice,
        distributions=DISTRIBUTIONS,
        system_attrs={"constraints:" + CONSTRAINT: 0.006 * PEAK},
    )
    study.add_trial(trial)
    assert study.trials[0].constraints == {CONSTRAINT: 0.006 * PEAK}
    measured = sampler._measurements(study.trials, maximize=True)
    assert measured.peak_bytes == {} and measured.peak_lower_bounds == {LARGE: pytest.approx(0.976 * PEAK)}
    assert LARGE in measured.over_budget


def test_a_sibling_that_cannot_fit_is_not_let_in_by_a_trial_at_the_cap() -> None:
    sibling = next(n for n, one in enumerate(CANDIDATES) if group(one) == group(CANDIDATES[LARGE]) and n != LARGE)
    candidates = [*CANDIDATES]
    candidates[sibling] = replace(CANDIDATES[sibling], predicted_bytes=int(0.98 * PEAK))
    budget, bound = int(0.97 * PEAK), {LARGE: 0.976 * PEAK}

    def probability(exact: dict[int, float], bounds: dict[int, float]) -> float:
        return float(memory_model.probability_of_fit(candidates, exact, budget, "cuda", bounds)[sibling])

    assert probability({}, bound) <= probability({}, {}) == probability(bound, {})


def test_a_peak_over_the_budget_that_was_measured_to_the_end_is_exact() -> None:
    sampler = PredictiveSampler(CANDIDATES, Rules(budget_bytes=100 * MIB))
    study = optuna.create_study(direction="maximize")
    study.enqueue_trial(CANDIDATES[0].choice)
    trial = study.ask(DISTRIBUTIONS)
    trial.set_constraint(CONSTRAINT, 5.0)
    study.tell(trial, BATCH * TOKENS / 2.0)
    measured = sampler._measurements(study.trials, maximize=True)
    assert measured.peak_bytes == {0: 100 * MIB + 5.0} and measured.peak_lower_bounds == {}
