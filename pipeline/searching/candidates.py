"""The configurations of a space with their predictions."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.progress import progress
from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice, Value, without_size
from pipeline.memory.device import hardware_of
from pipeline.memory.work import Work
from pipeline.prediction.predict import counted_causes, predict_each
from pipeline.prediction.prediction import Prediction
from pipeline.training.typical_step import typical_step

Works = tuple[Work, Work]
"""The work of a pass and of the update."""
Others = tuple[tuple[str, Value], ...]
"""The values of a configuration's dimensions other than the micro-batch size."""
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
    is_work_known: bool = True
    """Whether its work was counted, or is assumed of all alike; else it is that of one that is alike."""
    untraced: frozenset[str] = frozenset()
    """Dimensions of whose value the trace does not show the work."""
    predicted_bytes: int | None
    """The peak that the budget limits; None if it is not predicted."""
    is_expected: bool = False
    """Whether it is not predicted yet: its peak, if it has one, is what those of others let expect."""
    not_predicted: str | None = None
    """Why it cannot be predicted; None if it can."""
    smallest_budget_bytes: int | None = None
    """The smallest budget that suffices by its prediction; None: its peak, or any if that is not known."""

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that it may fit; 0 if it has no peak."""
        smallest_bytes = self.predicted_bytes if self.smallest_budget_bytes is None else self.smallest_budget_bytes
        return smallest_bytes or 0

    def fits(self, budget_bytes: int) -> bool:
        """Whether it may fit a budget: it is predicted to, or has no peak."""
        return self.smallest_bytes <= budget_bytes


def make_candidates(
    choices: Sequence[Choice], experiments: Sequence[Experiment], budget_bytes: int | None = None
) -> list[Candidate]:
    """Return a predicted candidate for each experiment, in their order, as a study of one's own needs them.

    One that cannot be predicted has the work of one that is alike.
    """
    unknown = [*map(unpredicted, choices, experiments)]
    return with_work_of_alike(with_predictions(unknown, experiments, budget_bytes))


def with_predictions(
    candidates: Sequence[Candidate], experiments: Sequence[Experiment], budget_bytes: int | None = None
) -> list[Candidate]:
    """Return the candidates of these experiments with their predictions.

    Each has its own, on a card that has `budget_bytes` for it, or the reason why it has none.
    """
    target, predicted = hardware_of(experiments[0].device), [*candidates]
    what = "1 configuration" if len(experiments) == 1 else f"{len(experiments)} configurations"
    with progress(f"predicting the memory of {what}", len(experiments)) as advance:
        for number, outcome in predict_each(experiments, target, budget_bytes=budget_bytes):
            predicted[number] = _predicted(candidates[number], outcome)
            advance(1)
    return predicted


def unpredicted(choice: Choice, experiment: Experiment) -> Candidate:
    """Return a candidate before its prediction."""
    untimed = {name for each in experiment.techniques for name in each.untimed}
    return Candidate(
        choice=choice,
        micro_batch_size=experiment.micro_batch_size,
        num_passes=experiment.accumulation_steps,
        num_tokens=typical_step(experiment, experiment.read_corpus()).num_tokens,
        pass_work=UNKNOWN * experiment.micro_batch_size,
        update_work=UNKNOWN,
        is_work_known=False,
        untraced=frozenset(untimed & choice.keys()),
        predicted_bytes=None,
        is_expected=True,
    )


def _predicted(candidate: Candidate, outcome: Prediction | InvalidInputError) -> Candidate:
    if isinstance(outcome, InvalidInputError):
        return without_prediction(candidate, outcome)
    return replace(
        candidate,
        is_expected=False,
        num_tokens=outcome.num_tokens,
        pass_work=outcome.mean_pass_work(candidate.num_passes),
        update_work=outcome.update_work,
        is_work_known=True,
        predicted_bytes=outcome.peak_bytes,
        smallest_budget_bytes=outcome.smallest_budget_bytes,
    )


def without_prediction(candidate: Candidate, error: InvalidInputError) -> Candidate:
    """Return a candidate that cannot be predicted, for this reason."""
    return replace(
        candidate,
        is_expected=False,
        predicted_bytes=None,
        smallest_budget_bytes=None,
        not_predicted=first_line(error),
    )


def with_work_of_alike(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates; those whose work is not known have that of one that is alike.

    That is one with the same values except for the size; where there is none, with the most values in common, the
    first in the order of the space. Of several sizes it is the closest, in proportion.
    """
    others = [without_size(one.choice) for one in candidates]
    known: dict[Others, dict[int, Works]] = {}
    for values, one in zip(others, candidates, strict=True):
        if one.is_work_known:
            known.setdefault(values, {})[one.micro_batch_size] = (one.pass_work, one.update_work)

    @cache
    def alike(values: Others) -> Mapping[int, Works]:
        in_common = {other: sum(map(operator.eq, values, other)) for other in known}
        return known.get(values) or known[max(known, key=in_common.__getitem__)]

    def with_work(candidate: Candidate, values: Others) -> Candidate:
        if candidate.is_work_known or not known:
            return candidate
        pass_work, update_work = _at_size(candidate.micro_batch_size, alike(values))
        return replace(candidate, pass_work=pass_work, update_work=update_work)

    return list(map(with_work, candidates, others))


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
    """Return how many of the candidates cannot be predicted, of those that were tried, a sentence for each cause."""
    num_tried = sum(not one.is_expected for one in candidates)
    return counted_causes([one.not_predicted for one in candidates if one.not_predicted], num_tried)


def known_peaks(candidates: Sequence[Candidate]) -> list[tuple[int, int]]:
    """Return the predicted peak and the index of each candidate that has a prediction."""
    return [
        (candidate.predicted_bytes, number)
        for number, candidate in enumerate(candidates)
        if candidate.predicted_bytes is not None and not candidate.is_expected
    ]
