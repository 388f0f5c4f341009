"""Profiles of a few optimizer steps: memory by tensor, and time by operator."""

import pickle
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.base.by_key import summed
from pipeline.base.contracts import Prepared
from pipeline.config.experiment import Experiment
from pipeline.memory.breakdown import Breakdown, ModuleMemory, StepMemory, at_peak, course_of, modules_at_peak
from pipeline.memory.device import occupy
from pipeline.memory.meter import WATCHED_STEPS
from pipeline.memory.recorder import LifetimeRecorder
from pipeline.memory.timeline import Timeline
from pipeline.training.loop import Loop
from pipeline.training.step import Build, build_step, built, unmarked

PROFILED_STEPS = 3
"""Optimizer steps under torch.profiler."""
MATRIX_PRODUCTS = frozenset(
    (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)
"""Operators that autocast runs in a lower precision."""


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """The memory of the first two optimizer steps."""

    peak: Breakdown
    modules: tuple[ModuleMemory, ...]
    """The memory at the peak by module and category."""
    course: StepMemory | None
    """The memory over the second optimizer step; None if the run did not complete it."""
    matrix_products_float32_percent: float | None
    """Percentage of the bytes of matrix products' results that are float32; None without matrix products."""


@dataclass(frozen=True, kw_only=True)
class OperatorCost:
    """The cost of one operator in an optimizer step, without the operators that it calls."""

    name: str
    calls: float
    seconds: float
    """On the device: CPU time of its own, or the time of the CUDA kernels that it launched."""
    num_bytes: int
    """Bytes allocated minus bytes freed."""


@dataclass(frozen=True, kw_only=True)
class TimeProfile:
    """The time of an optimizer step by phase and operator; it includes the overhead of the profiler."""

    seconds_per_step: float
    phase_seconds: dict[str, float]
    """By `data`, `forward`, `backward` and `optimizer`; the device is synchronized after each."""
    operators: tuple[OperatorCost, ...]
    device_idle_percent: float | None
    """Percentage of the time in which no kernel ran; None on a CPU."""


ProfileMessage = MemoryProfile | TimeProfile


def profile_run(
    experiment: Experiment, prepared: Prepared, emit: Callable[[ProfileMessage], None], folder: Path | None = None
) -> None:
    """Take a few optimizer steps and emit a MemoryProfile and a TimeProfile; write traces into `folder`.

    A MemoryProfile is emitted after every phase, so that a run that runs out of memory leaves the latest one.
    """
    occupy(experiment.device, experiment.budget_bytes)
    recorder = LifetimeRecorder(experiment.device)

    def emit_memory(*_: object) -> None:
        timeline = recorder.timeline()
        if timeline.storages:
            emit(memory_profile(timeline))

    try:
        loop = record_first_steps(experiment, prepared, recorder, emit_memory)
    finally:
        emit_memory()
    emit(_profile_time(loop, experiment.device, folder))
    if experiment.device.type == "cuda":
        _record_allocator(loop, folder)


def record_first_steps(
    experiment: Experiment,
    prepared: Prepared,
    recorder: LifetimeRecorder,
    mark: Callable[[int, str], None] = unmarked,
    build: Build = built,
) -> Loop:
    """Take the first two optimizer steps under the recorder; return the loop, to be continued without it.

    No tensor's value is read.
    """

    def mark_both(step: int, phase: str) -> None:
        recorder.mark(step, phase)
        mark(step, phase)

    torch.manual_seed(experiment.settings.seed)
    with recorder:
        step = build_step(experiment, prepared, build)
        mark_both(0, "load")
        optimizer = step.make_optimizer(step.trainable.module)
        loop = Loop(experiment, prepared.train, step, optimizer, lambda record: None)
        with recorder.watching(step.trainable, optimizer), step.run_context():
            for _ in range(WATCHED_STEPS):
                loop.launch(mark_both)
    return loop


def record_next_step(loop: Loop) -> Timeline:
    """Take one more optimizer step and return the storage lifetimes of it, and of what was there before it."""
    recorder, trainable = LifetimeRecorder(loop.step.device), loop.step.trainable
    with recorder, recorder.watching(trainable, loop.optimizer), loop.step.run_context():
        recorder.begin_later(WATCHED_STEPS - 1)
        loop.launch(lambda _, phase: recorder.mark(WATCHED_STEPS - 1, phase))
    return recorder.timeline()


def memory_profile(timeline: Timeline) -> MemoryProfile:
    """Return the memory profile of a timeline, which must not be empty."""
    complete = any(span.step >= WATCHED_STEPS - 1 and span.phase == "optimizer" for span in timeline.spans)
    sizes = summed((one.dtype, one.num_bytes) for one in timeline.storages if one.operator in MATRIX_PRODUCTS)
    return MemoryProfile(
        peak=at_peak(timeline),
        modules=modules_at_peak(timeline),
        course=course_of(timeline, WATCHED_STEPS - 1) if complete else None,
        matrix_products_float32_percent=100 * sizes["float32"] / sizes.total() if sizes else None,
    )


def _profile_time(loop: Loop, device: torch.device, folder: Path | None) -> TimeProfile:
    on_device = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    phase_seconds = defaultdict[str, float](float)
    # acc_events: without it torch 2.10 and 2.11 warn of events that a second cycle would clear; there is one.
    profiling = profile(activities=activities, profile_memory=True, record_shapes=True, acc_events=True)
    with loop.step.run_context(), profiling as profiled:
        last = time.perf_counter()

        def mark(_: int, phase: str) -> None:
            nonlocal last
            if on_device:
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            phase_seconds[phase] += now - last
            last = now

        loop.advance(PROFILED_STEPS, mark)
    if folder is not None:
        profiled.export_chrome_trace(str(folder / "trace.json.gz"))
    seconds = sum(phase_seconds.values())
    costs = [
        OperatorCost(
            name=event.key.removeprefix("aten::"),
            calls=event.count / PROFILED_STEPS,
            seconds=(event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6 / PROFILED_STEPS,
            num_bytes=(event.self_device_memory_usage if on_device else event.self_cpu_memory_usage) // PROFILED_STEPS,
        )
        for event in profiled.key_averages()
        if event.device_type.name == "CPU" and not event.key.startswith("[")
    ]
    return TimeProfile(
        seconds_per_step=seconds / PROFILED_STEPS,
        phase_seconds={phase: total / PROFILED_STEPS for phase, total in phase_seconds.items()},
        operators=tuple(sorted(costs, key=lambda cost: -cost.seconds)),
        device_idle_percent=_idle_percent(profiled, seconds) if on_device else None,
    )


def _idle_percent(profiled: profile, seconds: float) -> float | None:
    """Return the percentage of the time in which no kernel ran; None if the profiler recorded no kernel.

    There is one stream, so kernels do not overlap; user annotations are listed among the kernels and are left out.
    """
    kernels = [
        event.time_range.elapsed_us() / 1e6
        for event in profiled.events() or []  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    return 100 * max(0.0, 1 - sum(kernels) / seconds) if kernels else None


def _record_allocator(loop: Loop, folder: Path | None) -> None:
    """Write the caching allocator's snapshot of one optimizer step, and torch's HTML page of it."""
    from torch.cuda._memory_viz import trace_plot

    torch.cuda.memory._record_memory_history()
    with loop.step.run_context():
        loop.advance(1)
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    if folder is not None:
        (folder / "memory_snapshot.pickle").write_bytes(pickle.dumps(snapshot))
        (folder / "memory_trace.html").write_text(trace_plot(snapshot))  # type: ignore[no-untyped-call]
