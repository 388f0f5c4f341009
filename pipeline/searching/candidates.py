"""The configurations of a space with their predictions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice
from pipeline.memory.device import hardware_of
from pipeline.memory.work import Work
from pipeline.prediction.predict import Prediction, predict_each

Works = tuple[Work, Work]
"""The work of a pass and of the update."""
UNKNOWN = Work({"float32": 1.0})
"""The work where nothing can be predicted."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration."""

    choice: Choice
    micro_batch_size: int
    num_passes: int
    """Forward and backward passes of an optimizer step."""
    num_tokens: int
    """Tokens of an optimizer step."""
    pass_work: Work
    """Work of a pass, recomputation included."""
    update_work: Work
    """Work of the update."""
    untraced: frozenset[str] = frozenset()
    """Dimensions of whose value the trace does not show the work."""
    predicted_bytes: int | None
    """The peak that the budget limits; None if it cannot be predicted."""
    fits: Callable[[int], bool]
    """Whether it is predicted to fit a budget in bytes."""


def make_candidates(choices: Sequence[Choice], experiments: Sequence[Experiment]) -> list[Candidate]:
    """Return a candidate for each experiment, in their order.

    Each has its own prediction, and those that cannot be predicted have none: such a candidate takes the work of the
    one that is most alike.
    """
    target = hardware_of(experiments[0].device)
    shapes = [experiment.with_random_weights("cpu") for experiment in experiments]
    outcomes = predict_each(shapes, target)
    predictions = {number: outcome for number, outcome in outcomes if isinstance(outcome, Prediction)}
    works = {number: (one.pass_work, one.update_work) for number, one in predictions.items()}
    return [
        _candidate(
            choice, experiment, predictions.get(number), works.get(number) or _most_alike(choice, choices, works)
        )
        for number, (choice, experiment) in enumerate(zip(choices, experiments, strict=True))
    ]


def _most_alike(choice: Choice, choices: Sequence[Choice], works: Mapping[int, Works]) -> Works:
    """Return the work of the configuration that has most values in common with `choice`."""
    common = {number: sum(choices[number][name] == value for name, value in choice.items()) for number in works}
    return works[max(common, key=lambda number: common[number])] if works else (UNKNOWN, UNKNOWN)


def _candidate(choice: Choice, experiment: Experiment, prediction: Prediction | None, works: Works) -> Candidate:
    settings: Any = experiment.settings
    untraced = [each for each in experiment.techniques if each.not_predicted is not None]
    return Candidate(
        choice=choice,
        micro_batch_size=experiment.micro_batch_size,
        num_passes=settings.accumulation_steps,
        num_tokens=experiment.effective_batch_size * settings.sequence_length,
        pass_work=works[0],
        update_work=works[1],
        untraced=frozenset(name for each in untraced for name in type(each).model_fields if name in choice),
        predicted_bytes=prediction.peak_bytes if prediction else None,
        fits=prediction.fits if prediction else _may_fit,
    )


def _may_fit(_: int) -> bool:
    """Return True: without a prediction any configuration may fit."""
    return True
