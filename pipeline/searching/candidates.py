"""The configurations of a space with their predictions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice, Value
from pipeline.memory.device import hardware_of
from pipeline.prediction.predict import Prediction, predict_each


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
    """The peak that the budget limits; None if it cannot be predicted."""
    fits: Callable[[int], bool]
    """Whether it is predicted to fit a budget in bytes."""

    @property
    def group(self) -> tuple[Value, ...]:
        """Every value but the micro-batch size: checkpointing policy, precision and further dimensions."""
        return group_of(self.choice)


def group_of(choice: Choice) -> tuple[Value, ...]:
    """Return a choice without its micro-batch size."""
    return tuple(value for name, value in choice.items() if name != "micro_batch_size")


def make_candidates(choices: Sequence[Choice], experiments: Sequence[Experiment]) -> list[Candidate]:
    """Return a candidate for each experiment, in their order.

    Each has its own prediction, and those that cannot be predicted have none. The operations of a sequence do not
    depend on the micro-batch size, so a candidate without prediction takes those of another in its group, else the
    fewest known.
    """
    target = hardware_of(experiments[0].device)
    shapes = [experiment.with_random_weights("cpu") for experiment in experiments]
    outcomes = predict_each(shapes, target)
    predictions = {number: outcome for number, outcome in outcomes if isinstance(outcome, Prediction)}
    flops = {group_of(choices[number]): float(one.sequence_flops) for number, one in predictions.items()}
    fewest = min(flops.values(), default=1.0)
    return [
        _candidate(choice, experiment, predictions.get(number), flops.get(group_of(choice), fewest))
        for number, (choice, experiment) in enumerate(zip(choices, experiments, strict=True))
    ]


def _candidate(choice: Choice, experiment: Experiment, prediction: Prediction | None, flops: float) -> Candidate:
    settings: Any = experiment.settings
    return Candidate(
        choice=choice,
        micro_batch_size=experiment.micro_batch_size,
        num_passes=settings.accumulation_steps,
        num_tokens=experiment.effective_batch_size * settings.sequence_length,
        flops=float(prediction.sequence_flops) if prediction else flops,
        precision=settings.precision,
        predicted_bytes=prediction.peak_bytes if prediction else None,
        fits=prediction.fits if prediction else _may_fit,
    )


def _may_fit(_: int) -> bool:
    """Return True: without a prediction any configuration may fit."""
    return True
