"""What experiments have in common whose timelines are recorded once, or derived from one another."""

from pipeline.base.technique import Stage, Technique
from pipeline.config.experiment import Experiment
from pipeline.prediction.trace_cache import IRRELEVANT

RECORDED_SIZES = (2, 4, 8)
"""Micro-batch sizes from which others (but 1) are extrapolated: from the first two, if they predict the third."""
NUM_LARGER_SIZES = 3
"""Where a technique treats large storages in another way: the larger sizes that others are extrapolated from."""
SPLIT = ("micro_batch_size", "accumulation_steps", "effective_batch_size")
"""Settings of how a batch is split."""


def others_need(experiment: Experiment) -> bool:
    """Whether timelines of other micro-batch sizes are extrapolated from this one."""
    sizes = sizes_extrapolated_from(experiment, experiment.effective_batch_size)
    return experiment.micro_batch_size in sizes[: len(RECORDED_SIZES) + NUM_LARGER_SIZES]


def sizes_extrapolated_from(experiment: Experiment, batch: int) -> tuple[int, ...]:
    """Return the micro-batch sizes from which others are extrapolated: from any three that follow one another.

    Where layers treat storages above a threshold in another way, these are also the larger divisors of the effective
    batch.
    """
    largest = batch if size_thresholds(experiment) else RECORDED_SIZES[-1]
    larger = (size for size in range(RECORDED_SIZES[-1] + 1, largest + 1) if batch % size == 0)
    return (*RECORDED_SIZES, *larger)


def family_of(experiment: Experiment) -> str:
    """Return what the experiments have in common whose timelines are recorded once, or extrapolated from one another.

    They differ in how their batch is split, or in a setting that changes no storage.
    """
    names = (*SPLIT, *IRRELEVANT.split())
    left_out = {name: None for name in names if name in type(experiment.settings).model_fields}
    return repr(experiment.settings.model_copy(update=left_out))


def derivation_round(experiment: Experiment) -> int:
    """Return 0, 1 or 2: timelines of a later round can be derived from those of earlier ones.

    With another loss than the model's own, that of a model without techniques inside its layers comes first.
    """
    return int(bool(loss_techniques(experiment))) * (1 + bool(layer_techniques(experiment)))


def size_thresholds(experiment: Experiment) -> list[float]:
    """Return the sizes in bytes from which on a technique treats what the layers save in another way."""
    return [threshold for technique in experiment.techniques for threshold in technique.size_thresholds]


def loss_techniques(experiment: Experiment) -> list[Technique]:
    """Return the techniques that change the loss, and do not with their default settings."""
    return [each for each in experiment.techniques if each.stage is Stage.LOSS and _can_be_left_out(each)]


def layer_techniques(experiment: Experiment) -> list[Technique]:
    """Return the techniques that change nothing outside of the layers, and nothing with their default settings."""
    return [each for each in experiment.techniques if each.within_layers and _can_be_left_out(each)]


def _can_be_left_out(technique: Technique) -> bool:
    return technique.active and not type(technique)().active
