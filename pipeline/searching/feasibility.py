"""Predicts every configuration of a space and makes the sampler, before anything is stored or run."""

from collections.abc import Sequence
from typing import Any

from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB
from pipeline.config.space import Choice
from pipeline.memory.device import hardware_of
from pipeline.prediction.clipping import cost_of_clipping
from pipeline.searching.acquisition import Rules
from pipeline.searching.candidates import Candidate, make_candidates
from pipeline.searching.problem import SearchProblem
from pipeline.searching.results import label
from pipeline.searching.sampler import PredictiveSampler


def make_sampler(problem: SearchProblem) -> PredictiveSampler | None:
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
    sampler = PredictiveSampler(_candidates(problem, problem.space.choices), rules)
    if sampler.first is None:
        raise InvalidInputError(_nothing_fits(problem, sampler.candidates))
    return sampler


def _candidates(problem: SearchProblem, choices: Sequence[Choice]) -> list[Candidate]:
    return make_candidates(choices, [problem.experiment(choice) for choice in choices], problem.budget_bytes)


def _nothing_fits(problem: SearchProblem, candidates: Sequence[Candidate]) -> str:
    peak_bytes, number = min(_known_peaks(candidates))
    leanest, peak, budget = candidates[number], peak_bytes / MIB, problem.budget_bytes / MIB
    return (
        f"no configuration is predicted to fit the budget: the smallest predicted peak is {peak:,.1f} MiB, "
        f"{peak - budget:,.1f} MiB more than the {budget:,.1f} MiB ({label(leanest.choice)}); "
        f"{_what_would_help(problem, leanest.choice)}{_what_clipping_costs(problem, candidates)}"
    )


def _what_clipping_costs(problem: SearchProblem, candidates: Sequence[Candidate]) -> str:
    """Return what the candidates would need without clipping, as further text."""
    known = [(candidates[number], peak_bytes) for peak_bytes, number in _known_peaks(candidates)]
    peaks = [(problem.experiment(one.choice).with_random_weights("cpu"), peak_bytes) for one, peak_bytes in known]
    sentence = cost_of_clipping(peaks, hardware_of(problem.base.device), problem.budget_bytes)
    return f". {sentence.removesuffix('.')}" if sentence else ""


def _what_would_help(problem: SearchProblem, choice: Choice) -> str:
    """Return the change of one setting that lowers the smallest predicted peak most, and the new peak, as text."""
    settings: Any = problem.experiment(choice).settings
    changes = {
        "micro_batch_size": 1,
        "checkpointing": "every_layer",
        "precision": "bf16",
        "loss_kernel": "chunked",
        "sequence_length": max(2, settings.sequence_length // 2),
    }
    others = {
        name: value
        for name, value in changes.items()
        if getattr(settings, name) != value and problem.why_refused({**choice, name: value}) is None
    }
    candidates = _candidates(problem, [{**choice, name: value} for name, value in others.items()]) if others else []
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
