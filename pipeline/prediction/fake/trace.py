"""An Experiment -> its timeline on a CPU, recorded on fake tensors."""

from collections import Counter
from itertools import pairwise

from pipeline.base.contracts import Prepared
from pipeline.config.experiment import Experiment
from pipeline.memory.timeline import Timeline
from pipeline.prediction.fake.recording import record

STEADY_STEPS = 2
"""Micro-batches of an optimizer step that are recorded; further ones repeat the second."""
LARGEST_GROWTH_BYTES = 1024
"""Bytes that a further micro-batch may add in a steady step: the value of its loss."""


def trace(experiment: Experiment, prepared: Prepared) -> Timeline:
    """Return the timeline of two optimizer steps.

    Of more than two micro-batches in a step only two are recorded, if the second leaves no memory behind.

    Raises:
        InvalidInputError: the run reads the values of tensors.

    """
    num_rows = experiment.effective_batch_size
    size = experiment.micro_batch_size * experiment.num_data_ranks
    if num_rows > STEADY_STEPS * size:
        fewer = {"accumulation_steps": STEADY_STEPS, "effective_batch_size": STEADY_STEPS * size}
        short = Experiment(experiment.settings.model_copy(update=fewer))
        timeline = record(short, prepared, num_rows)  # the whole batch is alive during all micro-batches
        if is_steady(timeline):
            return timeline
    return record(experiment, prepared, num_rows)


def is_steady(timeline: Timeline) -> bool:
    """Whether the second micro-batch of the last optimizer step leaves the storages that it found, and hardly more."""
    step = max(span.step for span in timeline.spans if span.phase == "backward")
    ends = [after.begin for span, after in pairwise(timeline.spans) if (span.step, span.phase) == (step, "backward")]
    if len(ends) != STEADY_STEPS:
        return False
    found, left = (set(timeline.alive(end - 1).tolist()) for end in ends)
    freed, new = (
        Counter(
            (one.num_bytes, one.dtype, one.operator, one.module, one.category)
            for one in (timeline.storages[number] for number in numbers)
        )
        for numbers in (found - left, left - found)
    )
    return freed <= new and sum(num_bytes for num_bytes, *_ in (new - freed).elements()) <= LARGEST_GROWTH_BYTES
