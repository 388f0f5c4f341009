"""Training on a simulated card, on which no number is real."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

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
    train_answered(experiment, prepared, emit)


def train_answered(experiment: Experiment, prepared: Prepared, emit: Callable[[Any], None]) -> None:
    """Do the same with the weights that train() has, which ranks with copies of a model compare."""
    answer_as_a_card(has_documents=experiment.settings.sequences == "packed_documents")
    train(experiment, prepared, emit)


def answer_as_a_card(*, has_documents: bool) -> None:
    """Let transformers find what a card would: whether rows have several documents, asked in every forward pass.

    What the question allocates is allocated still. A simulated card cannot answer it: all that it compares is equal.
    """
    ask = masking_utils.find_packed_sequence_indices

    def one_sequence(position_ids: Tensor) -> None:
        ask(position_ids)

    def documents(position_ids: Tensor) -> Tensor:
        with patch.object(masking_utils, "is_tracing", lambda *_: True):  # it is not asked then
            found: Tensor = ask(position_ids)
        (found[:, -1] == 0).all()
        return found

    masking_utils.find_packed_sequence_indices = documents if has_documents else one_sequence


def _unchanged(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor
