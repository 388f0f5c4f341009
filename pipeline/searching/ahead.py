"""Looking ahead: what is predicted of the whole space, before anything is stored or run."""

from collections.abc import Sequence
from typing import Any

from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB
from pipeline.config.space import Choice
from pipeline.searching.acquisition import Rules
from pipeline.searching.candidates import Candidate, make_candidates
from pipeline.searching.problem import SearchProblem
from pipeline.searching.results import label
from pipeline.searching.sampler import PredictiveSampler


def make_sampler(plan: SearchProblem) -> PredictiveSampler | None:
    """Return the predictive sampler with its predictions, before anything is stored; None where another is asked for.

    Raises:
        InvalidInputError: nothing is predicted to fit.

    """
    if plan.settings.sampler != "predictive":
        return None
    rules = Rules(
        budget_bytes=plan.budget_bytes,
        fit_confidence=plan.settings.fit_confidence,
        gap=plan.settings.gap,
        kind=plan.base.device.type,
        whole_front=plan.settings.objectives == "pareto",
    )
    sampler = PredictiveSampler(_candidates(plan, plan.space.choices), rules)
    if sampler.first is None:
        raise InvalidInputError(_nothing_fits(plan, sampler.candidates))
    return sampler


def _candidates(plan: SearchProblem, choices: Sequence[Choice]) -> list[Candidate]:
    return make_candidates(choices, [plan.experiment(choice) for choice in choices])


def _nothing_fits(plan: SearchProblem, candidates: Sequence[Candidate]) -> str:
    peak_bytes, number = min(_known_peaks(candidates))
    leanest, peak, budget = candidates[number], peak_bytes / MIB, plan.budget_bytes / MIB
    return (
        f"something must fit the budget, and the smallest predicted peak is {peak:,.1f} MiB, "
        f"{peak - budget:,.1f} MiB more than the {budget:,.1f} MiB ({label(leanest.choice)}); "
        f"{_what_would_help(plan, leanest.choice)}"
    )


def _what_would_help(plan: SearchProblem, choice: Choice) -> str:
    """Return which other setting would bring the peak of the leanest configuration down most, and to what."""
    settings: Any = plan.experiment(choice).settings
    changes = {
        "micro_batch_size": 1,
        "checkpointing": "every_layer",
        "precision": "bf16",
        "sequence_length": max(2, settings.sequence_length // 2),
    }
    others = {name: value for name, value in changes.items() if getattr(settings, name) != value}
    candidates = _candidates(plan, [{**choice, name: value} for name, value in others.items()])
    peak_bytes, number = min(_known_peaks(candidates), default=(0, None))
    if number is None:
        return "choose a smaller model or a larger budget"
    name, peak = list(others)[number], peak_bytes / MIB
    return (
        f"{name}={others[name]} would help most, with {peak:,.1f} MiB; else choose a smaller model or a larger budget"
    )


def _known_peaks(candidates: Sequence[Candidate]) -> list[tuple[int, int]]:
    """Return the predicted peak and the index of each candidate that has a prediction."""
    return [
        (candidate.predicted_bytes, number)
        for number, candidate in enumerate(candidates)
        if candidate.predicted_bytes is not None
    ]
