"""The configurations of a space with their predictions."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.progress import progress
from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice, Value
from pipeline.memory.device import hardware_of
from pipeline.memory.work import Work
from pipeline.prediction.predict_all import counted_causes, predict_each
from pipeline.prediction.prediction import Prediction
from pipeline.training.typical_step import typical_step

Works = tuple[Work, Work]
"""The work of a pass and of the update."""
Others = tuple[tuple[str, Value], ...]
"""The values of a configuration's dimensions other than the micro-batch size."""
SIZE = "micro_batch_size"
UNKNOWN = Work({"float32": 1.0})
"""The work of a sequence, and of the update, where nothing is predicted."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration."""

    choice: Choice
    micro_batch_size: int
    num_passes: int
    """Forward and backward passes of an optimizer step."""
    num_tokens: float
    """Tokens of an optimizer step, without padding."""
    pass_work: Work
    """Work of a pass, recomputation included."""
    update_work: Work
    """Work of the update."""
    untraced: frozenset[str] = frozenset()
    """Dimensions of whose value the trace does not show the work."""
    predicted_bytes: int | None
    """The peak that the budget limits; None if it is not predicted."""
    not_predicted: str | None = None
    """Why it is not predicted; None if it is."""
    fits: Callable[[int], bool]
    """Whether it is predicted to fit a budget in bytes."""


def make_candidates(
    choices: Sequence[Choice], experiments: Sequence[Experiment], budget_bytes: int | None = None
) -> list[Candidate]:
    """Return a candidate for each experiment, in their order.

    Each has its own prediction, on a card that has `budget_bytes` for it, or the reason why it has none: such a
    candidate takes the work of one that is alike, in proportion to the micro-batch size.
    """
    target = hardware_of(experiments[0].device)
    shapes = [experiment.with_random_weights("cpu") for experiment in experiments]
    outcomes: dict[int, Prediction | InvalidInputError] = {}
    with progress(f"predicting the memory of {len(shapes)} configurations", len(shapes)) as advance:
        for number, outcome in predict_each(shapes, target, budget_bytes=budget_bytes):
            outcomes[number] = outcome
            advance(1)
    predictions = {number: outcome for number, outcome in outcomes.items() if isinstance(outcome, Prediction)}
    works = _works(choices, experiments, predictions)
    return [
        _candidate(choice, experiment, outcomes[number], works[number])
        for number, (choice, experiment) in enumerate(zip(choices, experiments, strict=True))
    ]


def _works(
    choices: Sequence[Choice], experiments: Sequence[Experiment], predictions: Mapping[int, Prediction]
) -> list[Works]:
    """Return the work of each configuration: the predicted one, or that of one that is alike.

    That is one with the same values except for the size; where there is none, with the most values in common, the
    first in the order of the space. Of several sizes it is the closest.
    """
    sizes = [experiment.micro_batch_size for experiment in experiments]
    others = [tuple(item for item in choice.items() if item[0] != SIZE) for choice in choices]
    known: dict[Others, dict[int, Works]] = {}
    for number in sorted(predictions):  # they are in the order in which they were made
        one = predictions[number]
        pass_work = one.mean_pass_work(experiments[number].accumulation_steps)
        known.setdefault(others[number], {})[sizes[number]] = (pass_work, one.update_work)

    @cache
    def alike(values: Others) -> Mapping[int, Works]:
        in_common = {other: sum(map(operator.eq, values, other)) for other in known}
        return known.get(values) or known[max(known, key=in_common.__getitem__)]

    if not known:
        return [(UNKNOWN * size, UNKNOWN) for size in sizes]
    return [_at_size(size, alike(values)) for size, values in zip(sizes, others, strict=True)]


def _at_size(size: int, works: Mapping[int, Works]) -> Works:
    """Return the work at a micro-batch size, in proportion to that at the closest one; calls stay as many."""
    closest = min(works, key=lambda known: abs(math.log(known / size)))
    pass_work, update_work = works[closest]
    scaled = pass_work * (size / closest)
    return (
        replace(
            scaled,
            num_kernels=pass_work.num_kernels,
            num_python_calls=pass_work.num_python_calls,
            sent_bytes=pass_work.sent_bytes,
        ),
        update_work,
    )


def not_predicted_notes(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Return how many of the candidates are not predicted, a sentence for each cause."""
    return counted_causes([one.not_predicted for one in candidates if one.not_predicted], len(candidates))


def known_peaks(candidates: Sequence[Candidate]) -> list[tuple[int, int]]:
    """Return the predicted peak and the index of each candidate that has a prediction."""
    return [
        (candidate.predicted_bytes, number)
        for number, candidate in enumerate(candidates)
        if candidate.predicted_bytes is not None
    ]


def _candidate(
    choice: Choice, experiment: Experiment, outcome: Prediction | InvalidInputError, works: Works
) -> Candidate:
    prediction = outcome if isinstance(outcome, Prediction) else None
    untimed = {name for each in experiment.techniques for name in each.untimed}
    return Candidate(
        choice=choice,
        micro_batch_size=experiment.micro_batch_size,
        num_passes=experiment.accumulation_steps,
        num_tokens=(prediction or typical_step(experiment, experiment.read_corpus())).num_tokens,
        pass_work=works[0],
        update_work=works[1],
        untraced=frozenset(untimed & choice.keys()),
        predicted_bytes=prediction.peak_bytes if prediction else None,
        not_predicted=first_line(outcome) if isinstance(outcome, InvalidInputError) else None,
        fits=prediction.fits if prediction else may_fit,
    )


def may_fit(_: int) -> bool:
    """Return True: without a prediction any configuration may fit."""
    return True
