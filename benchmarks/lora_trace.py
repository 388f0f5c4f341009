"""The LoRA step of benchmarks/published on fake tensors, and its peaks on the simulated caching allocator.

The step is not that of pipeline/training: adapters of peft, no autocast, and an output that stays alive until the
optimizer's step has ended.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from lora_model import Run, build
from replayed import Phase, served
from torch import Tensor

from pipeline.base.contracts import Hardware
from pipeline.memory.allocator import CachingAllocator
from pipeline.memory.recorder import LifetimeRecorder
from pipeline.memory.timeline import Lifetime, Timeline
from pipeline.memory.work import Work
from pipeline.prediction.fake_card import CARD
from pipeline.prediction.fake_device import simulated
from pipeline.prediction.workspaces import WorkspaceTable

WARM_UP, MEASURED, BY_PHASE = range(3)
"""The three optimizer steps of a measurement."""
MEASURED_WITH = (2, 11)
"""The newest version of torch whose own build for CUDA, on a simulated T4, has the published peaks."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The storage lifetimes of a measurement."""

    timeline: Timeline
    loaded_at: int
    """Index of the first event after the model was loaded."""
    emptied_at: int | None
    """Index of the event before which the cache was emptied."""
    phases: dict[int, Phase]
    """By the index of their first event."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """What a measurement reads from the allocator, in bytes."""

    after_load: int
    forward: int
    backward: int
    optimizer: int
    allocated: int
    reserved: int


def trace(run: Run, shape: dict[str, str], target: Hardware) -> Trace:
    """Return the lifetimes of loading the model and of three optimizer steps."""
    emptied: list[int] = []
    with (
        _replaced_functions(),
        simulated(target) as mode,
        LifetimeRecorder(CARD, WorkspaceTable(target, MEASURED_WITH), mode.run) as recorder,
    ):
        model = build(run, shape, lambda: emptied.append(_num_events(recorder)))
        loaded_at = _num_events(recorder)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = _optimizer(trained)
        tokens = torch.empty((run.batch_size, run.sequence_length), dtype=torch.long, device=CARD)
        recorder.mark(WARM_UP, "load")
        phases: dict[int, Phase] = {0: (WARM_UP, "load")}
        for step in (WARM_UP, MEASURED, BY_PHASE):
            optimizer.zero_grad(set_to_none=True)
            phases[_num_events(recorder)] = step, "forward"
            output = model(input_ids=tokens, labels=tokens)
            recorder.mark(step, "forward")
            phases[_num_events(recorder)] = step, "backward"
            output.loss.backward()
            recorder.mark(step, "backward")
            phases[_num_events(recorder)] = step, "optimizer"
            optimizer.step()
            recorder.mark(step, "optimizer")
            del output
        timeline = recorder.timeline()
    emptied_at = emptied[0] if emptied else None
    return Trace(timeline=timeline, loaded_at=loaded_at, emptied_at=emptied_at, phases=phases)


def step_work(run: Run, shape: dict[str, str], target: Hardware) -> tuple[Work, Work]:
    """Return the work of a forward and backward pass, and of the update, of a step for which optimizer state exists."""
    with (
        _replaced_functions(),
        simulated(target) as mode,
        LifetimeRecorder(CARD, WorkspaceTable(target, MEASURED_WITH), mode.run) as recorder,
    ):
        model = build(run, shape, lambda: None)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = _optimizer(trained)
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.mark(0, "load")
        tokens = torch.empty((run.batch_size, run.sequence_length), dtype=torch.long, device=CARD)
        output = model(input_ids=tokens, labels=tokens)
        recorder.mark(0, "forward")
        output.loss.backward()
        recorder.mark(0, "backward")
        optimizer.step()
        recorder.mark(0, "optimizer")
        timeline = recorder.timeline()
    return timeline.pass_work(1), timeline.update_work


def _optimizer(trained: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained, lr=1e-4, foreach=True)  # torch's default on CUDA


def replay(trace: Trace) -> Peaks:
    """Return the peaks of an allocator that serves the lifetimes, in the order of MEASURED_WITH."""
    allocator, after_load, reserved = CachingAllocator(oldest_first=False), 0, 0
    peaks = Counter[Phase]()
    for number, phase in served(trace.timeline, allocator, trace.phases, _bytes_on_card):
        peaks[phase] = max(peaks[phase], allocator.allocated_bytes)
        if number + 1 == trace.loaded_at:
            after_load = allocator.allocated_bytes
        if number + 1 == trace.emptied_at:
            allocator.empty_cache()
        if phase[0] == MEASURED:
            reserved = allocator.reserved_bytes
    return Peaks(
        after_load=after_load,
        forward=peaks[BY_PHASE, "forward"],
        backward=peaks[BY_PHASE, "backward"],
        optimizer=peaks[BY_PHASE, "optimizer"],
        allocated=max(peak for (step, _), peak in peaks.items() if step == MEASURED),
        reserved=reserved,
    )


@contextmanager
def _replaced_functions() -> Iterator[None]:
    """Repeat keys and values before attention, as the measurement did, and read no optimizer's step count."""
    attention = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
            options.pop("enable_gqa", None)
        return attention(query, key, value, *args, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", attend))
        stack.enter_context(patch.object(import_module("torch.optim.adam"), "_get_value", lambda step: 1.0))
        yield


def _num_events(recorder: LifetimeRecorder) -> int:
    return len(recorder.timeline().events_E)


def _bytes_on_card(lifetime: Lifetime) -> int:
    """Return the bytes of a storage, 0 for the optimizer's step counts, which are on the host."""
    return 0 if lifetime.module == "optimizer" and not lifetime.shape else lifetime.num_bytes
