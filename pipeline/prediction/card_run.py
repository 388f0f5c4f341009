"""An Experiment on the simulated card of this process -> Prediction: the training's own code runs there."""

import gc
import os
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from pipeline.base.contracts import Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.ranks import Ranks
from pipeline.base.results import MemoryUse
from pipeline.base.technique import Step
from pipeline.config.experiment import Experiment
from pipeline.memory.breakdown import at_peak
from pipeline.memory.timeline import Timeline
from pipeline.memory.work import Work
from pipeline.prediction.fake_batches import RepeatedRow
from pipeline.prediction.patches import lines_of_documents, lines_of_outliers, masks_known, masks_of
from pipeline.prediction.prediction import Prediction
from pipeline.simulation.process.replay import smallest_cap
from pipeline.simulation.report import unknown_reads_of
from pipeline.techniques._support import offloading
from pipeline.training.loop import Loop, train
from pipeline.training.profiler import record_next_step
from pipeline.training.step import with_parameters
from pipeline.training.typical_step import TypicalStep

DEVICE = torch.device("cuda:0")
NUM_STEPS = 3
"""Optimizer steps that run: the first makes the optimizer's state, after the third the allocator reserves no more."""
NUM_PASSES = 2
"""Micro-batches of an optimizer step that run; further ones repeat the second."""
NUM_EVENTS = 10**7
"""Of the allocator that are kept, at most: of gpt2 a training has up to 40,000."""


def run_on_card(
    experiment: Experiment,
    prepared: Prepared,
    typical: TypicalStep,
    *,
    context_bytes: int,
    budget_bytes: int,
    is_recorded: bool,
) -> Prediction:
    """Run the training without a cap, with one more step recorded; once more, if it reserves more than its budget.

    This process has no CUDA context yet, and its card has memory for every training. The recording takes most of the
    time, and tells the work and the breakdown.

    Raises:
        InvalidInputError: the training reads from the card what is not known there and may steer it.
        Exception: whatever the training raises.

    """
    short, rows = _shortened(experiment, prepared)
    answered = lines_of_documents() | lines_of_outliers()
    with masks_known(**masks_of(experiment, prepared)):
        timeline: Timeline | None = None

        def at_end(loop: Loop) -> None:
            nonlocal timeline
            _refuse_steering_reads(answered)
            if is_recorded:
                timeline = record_next_step(loop)

        use = _use(short, rows, at_end)
        allocated, reserved = use.peak_allocated_bytes, use.peak_reserved_bytes
        assert allocated is not None
        assert reserved is not None
        smallest = reserved
        if allocated <= budget_bytes < reserved:
            smallest = _smallest_budget(short, rows)
    return Prediction(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        peak_device_bytes=reserved + context_bytes,
        smallest_budget_bytes=smallest,
        breakdown=None if timeline is None else at_peak(timeline),
        micro_batch_size=experiment.micro_batch_size,
        pass_work=Work()
        if timeline is None
        else timeline.pass_work(experiment.accumulation_steps).shortened(typical.share, typical.square_share),
        last_pass_work=timeline.last_pass_work if timeline else Work(),
        update_work=timeline.update_work if timeline else Work(),
        num_tokens=typical.num_tokens,
    )


def _shortened(experiment: Experiment, prepared: Prepared) -> tuple[Experiment, Prepared]:
    """Return the same training with few steps and passes, and examples that all have the shape of the first."""
    experiment = experiment.on_device(str(DEVICE))
    num_passes = min(experiment.accumulation_steps, NUM_PASSES)
    changes = {
        "num_steps": NUM_STEPS,
        "learning_rate_schedule": "constant",
        "timing_warmup_steps": NUM_STEPS - 1,
        "eval_steps": 0,
        "gradient_underflow": False,
        "budget": None,
        "accumulation_steps": num_passes,
        "effective_batch_size": num_passes * experiment.micro_batch_size * experiment.num_data_ranks,
    }
    rows = RepeatedRow(prepared.train)
    short = Experiment(experiment.settings.model_copy(update=changes))
    return short, replace(prepared, train=rows, held_out=rows)


def build_without_values(experiment: Experiment, prepared: Prepared, ranks: Ranks) -> Step:
    """Build the model as training does, but for the values of its weights, which take the time."""
    trainable = experiment.model.built_for_structure(experiment.settings.model, prepared.vocabulary_size)
    is_on_meta = any(tensor.is_meta for tensor in _tensors(trainable.module))  # else its code needs values
    with torch.device("meta" if is_on_meta else "cpu"):
        step = with_parameters(experiment, trainable, ranks)
    give_memory(step.trainable.module)
    return step


def give_memory(module: nn.Module) -> None:
    """Turn the tensors of a module on the meta device into ones of the host, whose memory nothing has touched."""
    for tensor in {id(tensor): tensor for tensor in _tensors(module)}.values():
        if tensor.is_meta:
            _give_memory(tensor)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        yield from (tensor for tensor in (*part._parameters.values(), *part._buffers.values()) if tensor is not None)


def _give_memory(tensor: torch.Tensor) -> None:
    """Turn a tensor on the meta device into one of the host; its class and attributes stay."""
    kind, attributes = type(tensor), dict(vars(tensor))
    other = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    tensor.__class__ = kind
    vars(tensor).update(attributes)


def _use(experiment: Experiment, prepared: Prepared, at_end: Callable[[Loop], None] | None = None) -> MemoryUse:
    """Train, and return the last reading of the memory."""
    readings: list[MemoryUse] = []

    def receive(message: object) -> None:
        if isinstance(message, MemoryUse):
            readings.append(message)

    train(experiment, prepared, receive, build=build_without_values, at_end=at_end)
    return readings[-1]


def _smallest_budget(experiment: Experiment, prepared: Prepared) -> int:
    """Return the smallest cap under which the allocator serves what the training asks of it, run once more."""
    _free_all()
    torch.cuda.memory._record_memory_history(context=None, max_entries=NUM_EVENTS)
    _use(experiment, prepared)
    trace = torch.cuda.memory._snapshot()["device_traces"][DEVICE.index]
    torch.cuda.memory._record_memory_history(enabled=None)
    _free_all()
    return smallest_cap(trace, torch)


def _free_all() -> None:
    """Leave the allocator as new, after a training."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _refuse_steering_reads(answered: Container[str]) -> None:
    """Raise InvalidInputError if this process has read from the card what is not known and may steer it.

    Reads at the places `answered` steer nothing, nor do those of tensors that are offloaded.
    """
    for read in unknown_reads_of(Path(os.environ["SIMULATED_CARD_REPORT"]), os.getpid()):
        if read.may_steer and read.place not in answered and not read.place.startswith(f"{offloading.__file__}:"):
            raise InvalidInputError(
                f"{read.place} reads a value, and a prediction runs the step on tensors without values"
            )
