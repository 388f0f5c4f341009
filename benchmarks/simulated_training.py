"""Training on a simulated card, with the weights that the host's memory happens to hold."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pipeline.base.contracts import Prepared
from pipeline.config.experiment import Experiment
from pipeline.training.loop import train


def train_any_weights(experiment: Experiment, prepared: Prepared, emit: Callable[[Any], None]) -> None:
    """Train in a process of its own, without drawing random weights: it takes longer than the rest of the run.

    No number reaches a simulated card, and the allocations are those of train().
    """
    Tensor.normal_ = Tensor.uniform_ = _unchanged  # type: ignore[assignment]
    train(experiment, prepared, emit)


def _unchanged(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor
