"""The configurations of a space with all that is known of them before one is measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice, Value
from pipeline.memory.device import hardware_of
from pipeline.prediction.predict import Prediction, predict_all


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration."""

    choice: Choice
    micro_batch_size: int
    num_passes: int
    """Forward and backward passes of an optimizer step."""
    num_tokens: int
    """Tokens of an optimizer step."""
    flops: float
    """Floating-point operations of one sequence, recomputation included."""
    precision: str
    predicted_bytes: int | None
    """The peak that the budget limits; None where it cannot be predicted."""
    fits: Callable[[int], bool]
    """Whether it is predicted to fit a budget in bytes."""

    @property
    def group(self) -> tuple[Value, ...]:
        """What it has in common with others beside the micro-batch: policy, precision and whatever else varies."""
        return group_of(self.choice)


def group_of(choice: Choice) -> tuple[Value, ...]:
    """Return a choice without its micro-batch size."""
    return tuple(value for name, value in choice.items() if name != "micro_batch_size")


def make_candidates(choices: Sequence[Choice], experiments: Sequence[Experiment]) -> list[Candidate]:
    """Return the candidates that these experiments are, in their order.

    Where memory cannot be predicted, no candidate has a prediction, and the work of all counts as the same.
    """
    target = hardware_of(experiments[0].device)
    shapes = [experiment.with_random_weights("cpu") for experiment in experiments]
    predictions: dict[int, Prediction] = {}
    try:
        predictions.update(predict_all(shapes, target))
    except InvalidInputError:
        predictions = {}
    return [
        _candidate(choice, experiment, predictions.get(number))
        for number, (choice, experiment) in enumerate(zip(choices, experiments, strict=True))
    ]


def _candidate(choice: Choice, experiment: Experiment, prediction: Prediction | None) -> Candidate:
    settings: Any = experiment.settings
    return Candidate(
        choice=choice,
        micro_batch_size=experiment.micro_batch_size,
        num_passes=settings.accumulation_steps,
        num_tokens=experiment.effective_batch_size * settings.sequence_length,
        flops=float(prediction.sequence_flops) if prediction else 1.0,
        precision=settings.precision,
        predicted_bytes=prediction.peak_bytes if prediction else None,
        fits=prediction.fits if prediction else _may_fit,
    )


def _may_fit(_: int) -> bool:
    """Return True: nothing is known."""
    return True
