"""The figures that claims are about, from the records of their runs; a variant comes before its baseline."""

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from folklore.claim import NotMeasuredError, Record
from pipeline.base.results import Outcome

Figure = Callable[[Sequence[Record]], float]


def memory_saved_percent(records: Sequence[Record]) -> float:
    """Return how much lower the variant's peak of live tensors is."""
    return 100 * (1 - _ratio(records, "peak_allocated_mib"))


def memory_added_percent(records: Sequence[Record]) -> float:
    """Return how much higher the variant's peak of live tensors is."""
    return -memory_saved_percent(records)


def activations_saved_percent(records: Sequence[Record]) -> float:
    """Return how much less the variant keeps from the forward to the backward pass."""
    variant, baseline = map(activations_mib, records)
    return 100 * (1 - variant / baseline)


def speedup(records: Sequence[Record]) -> float:
    """Return the variant's samples per second over the baseline's."""
    return _ratio(records, "samples_per_second")


def slower_percent(records: Sequence[Record]) -> float:
    """Return how much more time a sample takes in the variant."""
    return 100 * (1 / speedup(records) - 1)


def final_loss_difference_percent(records: Sequence[Record]) -> float:
    """Return the distance of the final losses, of the baseline's."""
    return 100 * abs(_ratio(records, "final_loss") - 1)


def largest_loss_difference_percent(records: Sequence[Record]) -> float:
    """Return the largest distance of the losses of the same step, of the baseline's."""
    variant, baseline = map(_losses, records)
    return max(100 * abs(one / other - 1) for one, other in zip(variant, baseline, strict=True))


def smoother_percent(records: Sequence[Record]) -> float:
    """Return how much smaller the standard deviation of the loss's changes from step to step is.

    That of the losses themselves would be mostly the fall of the loss.
    """
    variant, baseline = (statistics.pstdev([b - a for a, b in pairwise(_losses(record))]) for record in records)
    return 100 * (1 - variant / baseline)


def parameters_mib(record: Record) -> float:
    """Return what lives once the model is on its device."""
    return record.figure("allocated_after_load_mib")


def optimizer_state_mib(record: Record) -> float:
    """Return what lives after the first update beside the parameters."""
    return record.figure("allocated_after_optimizer_1_mib") - parameters_mib(record)


def gradients_mib(record: Record) -> float:
    """Return what lives after a backward pass and not after the update."""
    return record.figure("allocated_after_backward_2_mib") - record.figure("allocated_after_optimizer_2_mib")


def activations_mib(record: Record) -> float:
    """Return what a forward pass leaves for the backward pass, without accumulated gradients."""
    return record.figure("allocated_after_forward_2_mib") - record.figure("allocated_after_optimizer_1_mib")


def peak_rise_in_gradients_percent(records: Sequence[Record]) -> float:
    """Return the rise of the peak from the baseline to the variant, of the size of all gradients."""
    variant, baseline = (record.figure("peak_allocated_mib") for record in records)
    return 100 * (variant - baseline) / gradients_mib(records[1])


def fit_error_percent(records: Sequence[Record]) -> float:
    """Return the largest error of `seconds per step = passes x a + b`, fitted to the cuts of one batch."""
    passes = [float(record.params["accumulation_steps"]) for record in records]
    seconds = np.array([record.figure("seconds_per_step") for record in records])
    fitted = np.polyval(np.polyfit(passes, seconds, 1), passes)
    return float(100 * np.max(np.abs(fitted / seconds - 1)))


def largest_micro_batch(records: Sequence[Record]) -> float:
    """Return the largest micro-batch that ended within its budget, 0 where none did."""
    sizes = [float(record.params["micro_batch_size"]) for record in records if _fits(record)]
    return max(sizes, default=0.0)


def completed_percent(records: Sequence[Record]) -> float:
    """Return 100 where the run ended within its budget, 0 where it ran out of memory."""
    (record,) = records
    return 100.0 if _fits(record) else 0.0


def alone(figure: Callable[[Record], float], divisor: float = 1.0) -> Figure:
    """Return the figure of a single run, in units of `divisor`."""
    return lambda records: figure(records[0]) / divisor


def _ratio(records: Sequence[Record], name: str) -> float:
    variant, baseline = (record.figure(name) for record in records)
    return variant / baseline


def _losses(record: Record) -> tuple[float, ...]:
    record.figure("final_loss")  # raises where the run did not end
    return record.losses


def _fits(record: Record) -> bool:
    if record.outcome not in (Outcome.OK, Outcome.OVER_BUDGET, Outcome.OUT_OF_MEMORY):
        raise NotMeasuredError(record.outcome.value)
    return record.outcome is Outcome.OK
