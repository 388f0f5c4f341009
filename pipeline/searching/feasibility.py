"""Predicts every configuration of a space and makes the sampler, before anything is stored or run."""

from collections.abc import Sequence

from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB
from pipeline.searching.acquisition import Rules
from pipeline.searching.candidates import Candidate, known_peaks
from pipeline.searching.interface import Problem
from pipeline.searching.results import label
from pipeline.searching.sampler import PredictiveSampler


def make_sampler(problem: Problem) -> PredictiveSampler | None:
    """Return the predictive sampler with the predictions of all configurations; None for one of Optuna's samplers.

    Raises:
        InvalidInputError: nothing is predicted to fit.

    """
    if problem.settings.sampler != "predictive":
        return None
    rules = Rules(
        budget_bytes=problem.budget_bytes,
        fit_confidence=problem.settings.fit_confidence,
        gap=problem.settings.gap,
        kind=problem.base.device.type,
        whole_front=problem.settings.objectives == "pareto",
    )
    sampler = PredictiveSampler(problem.candidates(problem.space.choices), rules)
    if sampler.first is None:
        raise InvalidInputError(_nothing_fits(problem, sampler.candidates))
    return sampler


def _nothing_fits(problem: Problem, candidates: Sequence[Candidate]) -> str:
    peak_bytes, number = min(known_peaks(candidates))
    leanest, peak, budget = candidates[number], peak_bytes / MIB, problem.budget_bytes / MIB
    return (
        f"no configuration is predicted to fit the budget: the smallest predicted peak is {peak:,.1f} MiB, "
        f"{peak - budget:,.1f} MiB more than the {budget:,.1f} MiB ({label(leanest.choice)}); "
        f"{problem.how_to_fit(candidates)}"
    )
