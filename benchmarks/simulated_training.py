"""Training on a simulated card, on which no number is real."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import masking_utils

from pipeline.base.contracts import Prepared
from pipeline.config.experiment import Experiment
from pipeline.training.loop import train


def train_any_weights(experiment: Experiment, prepared: Prepared, emit: Callable[[Any], None]) -> None:
    """Train in a process of its own, with the weights that the host's memory happens to hold.

    Drawing random ones takes longer than the rest of the run, and no number reaches a simulated card. The allocations
    are those of train().
    """
    Tensor.normal_ = Tensor.uniform_ = _unchanged  # type: ignore[assignment]
    answer_as_a_card()
    train(experiment, prepared, emit)


def answer_as_a_card() -> None:
    """Let transformers find that each row is one sequence, which it asks the card in every forward pass.

    What the question allocates is allocated still. A simulated card cannot answer it for a micro-batch of one.
    """
    ask = masking_utils.find_packed_sequence_indices

    def one_sequence(position_ids: Tensor) -> None:
        ask(position_ids)

    masking_utils.find_packed_sequence_indices = one_sequence


def _unchanged(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor
