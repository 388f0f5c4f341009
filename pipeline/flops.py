"""An Experiment on fake tensors -> the floating-point operations of its optimizer step."""

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pipeline.contracts import Hardware, Prepared
from pipeline.experiment import Experiment
from pipeline.memory.meter import WATCHED_STEPS
from pipeline.trace import record, shallow_depths

CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),  # type: ignore[no-untyped-call]
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda out, q, k, v, *_, **__: sdpa_backward_flop_count(out, q, k, v)  # type: ignore[no-untyped-call]
    ),
}
"""Operators that torch's counter leaves out, counted as it counts their CUDA counterparts."""


def count_flops(experiment: Experiment, target: Hardware) -> int:
    """Return the floating-point operations of one optimizer step, recomputation included, as torch counts them.

    Those of a deep model are told by two shallow ones, if these tell those of a third.

    Raises:
        InvalidInputError: as trace().

    """
    prepared = experiment.read_corpus()
    shallow = shallow_depths(experiment)
    if shallow is None:
        return _counted(experiment, target, prepared)
    depths, times = shallow
    first, second, third = (_counted(experiment.with_layers(depth), target, prepared) for depth in depths)
    if third - second != second - first:
        return _counted(experiment, target, prepared)
    return first + times * (second - first)


def sequence_flops(experiment: Experiment, target: Hardware) -> int:
    """Return the floating-point operations for one sequence: the same for any cut of the batch.

    Raises:
        InvalidInputError: as trace().

    """
    cut = {"micro_batch_size": 1, "accumulation_steps": 1, "effective_batch_size": 1}
    return count_flops(Experiment(experiment.settings.model_copy(update=cut)), target)


def _counted(experiment: Experiment, target: Hardware, prepared: Prepared) -> int:
    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    with counter:
        record(experiment, target, prepared, experiment.effective_batch_size)
    return int(counter.get_total_flops()) // WATCHED_STEPS
