"""What would make a configuration of Fitproof's own training fit, where none does."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.base.units import MIB
from pipeline.config.space import Choice
from pipeline.memory.device import hardware_of
from pipeline.planning.clipping import cost_of_clipping
from pipeline.searching.candidates import Candidate, known_peaks

if TYPE_CHECKING:
    from pipeline.searching.problem import SearchProblem


def what_would_help(problem: "SearchProblem", candidates: Sequence[Candidate]) -> str:
    """Return the change of the leanest configuration that lowers its peak most, and what clipping costs."""
    _, number = min(known_peaks(candidates))
    return f"{_change_that_helps(problem, candidates[number].choice)}{_what_clipping_costs(problem, candidates)}"


def _what_clipping_costs(problem: "SearchProblem", candidates: Sequence[Candidate]) -> str:
    """Return what the candidates would need without clipping, as further text."""
    known = [(candidates[number], peak_bytes) for peak_bytes, number in known_peaks(candidates)]
    peaks = [(problem.experiment(one.choice).with_random_weights("cpu"), peak_bytes) for one, peak_bytes in known]
    sentence = cost_of_clipping(peaks, hardware_of(problem.base.device), problem.budget_bytes)
    return f". {sentence.removesuffix('.')}" if sentence else ""


def _change_that_helps(problem: "SearchProblem", choice: Choice) -> str:
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
    candidates = problem.candidates([{**choice, name: value} for name, value in others.items()]) if others else []
    peak_bytes, number = min(known_peaks(candidates), default=(0, None))
    if number is None:
        return "choose a smaller model or a larger budget"
    name, peak = list(others)[number], peak_bytes / MIB
    return (
        f"{name}={others[name]} would help most, with {peak:,.1f} MiB; else choose a smaller model or a larger budget"
    )
