"""The training loop: optimizer steps on the same sequences in the same order, timed and emitted as events."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from pipeline.base.contracts import Prepared, Sequences, split
from pipeline.base.ranks import CollectiveEntered
from pipeline.base.results import Finished, MemoryUse, StepRecord
from pipeline.base.technique import Step
from pipeline.config.experiment import Experiment
from pipeline.config.settings import RunSettings
from pipeline.memory.device import occupy
from pipeline.memory.meter import WATCHED_STEPS, make_meter
from pipeline.training.saving import NEVER_SAVED, Saving, restore
from pipeline.training.step import (
    Build,
    StepOutput,
    Window,
    build_step,
    built,
    counted_layers,
    evaluate,
    gradient_underflow_percent,
    optimizer_step,
    ranks_of,
    unmarked,
)

Message = StepRecord | MemoryUse | Finished | CollectiveEntered
"""An event of a training run."""
Stop = Callable[[Sequence[float]], bool]
"""Whether to stop early, given the seconds for each token, with padding, of each optimizer step so far."""


class DivergedError(ArithmeticError):
    """A loss was infinite or NaN."""


def never_stop(_: Sequence[float]) -> bool:
    """Return False: take all optimizer steps."""
    return False


def train(
    experiment: Experiment,
    prepared: Prepared,
    emit: Callable[[Message], None],
    stop: Stop = never_stop,
    build: Build = built,
    at_end: Callable[["Loop"], None] | None = None,
    saving: Saving = NEVER_SAVED,
) -> None:
    """Train, and emit each optimizer step, the memory used and the final measurements.

    Training ends after num_steps optimizer steps, or as soon as `stop` returns True, which is called after each step.
    Where `saving` resumes one, these include the steps that were taken before.
    `at_end` is called with the loop after the memory was read for the last time.
    With several ranks each emits the slowest one's times and the largest one's memory, or its own where it fails.

    Raises:
        DivergedError: a loss was infinite or NaN; the steps before it have been emitted.

    """
    settings, ranks = experiment.settings, ranks_of(experiment, emit)
    meter = make_meter(experiment.device)
    occupy(experiment.device, experiment.budget_bytes)
    try:
        torch.manual_seed(settings.seed)
        step = build_step(experiment, prepared, build, ranks)
        if ranks.data_rank:  # the weights are those of all ranks, and the dropout is that of its sequences
            torch.manual_seed(settings.seed + ranks.data_rank)
        meter.mark(0, "load")
        optimizer = step.make_optimizer(step.trainable.module)
        with step.run_context():
            loop = Loop(experiment, prepared.train, step, optimizer, emit)
            if saving.resume is not None:
                restore(loop, saving.resume)
            with counted_layers(step.trainable.layers) as forwards:
                loop.advance(1, meter.mark)
            loop.advance(min(WATCHED_STEPS - 1, settings.num_steps - loop.num_launched), meter.mark)
            meter.stop()
            emit(ranks.largest_use(meter.read()))
            for end in saving.ends(loop.num_launched, settings.num_steps):
                loop.advance(end - loop.num_launched, stop=stop)
                saving.save(loop, experiment)
                if loop.num_launched < end:  # `stop` ends it
                    break
            eval_loss = None
            if settings.eval_steps:
                meter.begin_evaluation()
                eval_loss = evaluate(step, prepared.held_out, settings.eval_steps)
    except BaseException:
        meter.stop()
        emit(meter.read())
        raise
    emit(ranks.largest_use(meter.read()))
    if at_end is not None:
        at_end(loop)
    with step.run_context():
        if eval_loss is not None and not math.isfinite(eval_loss):
            raise DivergedError(f"the loss on held-out documents is {eval_loss}")
        underflow = None
        if settings.gradient_underflow:
            underflow = gradient_underflow_percent(step, optimizer, loop.window(loop.num_launched - 1))
    emit(Finished(eval_loss=eval_loss, gradient_underflow_percent=underflow, block_forwards_per_step=len(forwards)))


def learning_rate(step: int, settings: RunSettings, effective_batch_size: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0."""
    highest = highest_learning_rate(settings, effective_batch_size)
    warmup = settings.learning_rate_warmup_steps
    if step < warmup:
        return highest * (step + 1) / warmup
    if settings.learning_rate_schedule == "constant":
        return highest
    left = (settings.num_steps - step) / (settings.num_steps - warmup)
    return highest * (left if settings.learning_rate_schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


def highest_learning_rate(settings: RunSettings, effective_batch_size: int) -> float:
    """Return the learning rate after warm-up, scaled with the effective batch size."""
    ratio = effective_batch_size / settings.base_batch_size
    return (
        settings.learning_rate
        * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[settings.learning_rate_scaling]
    )


def rows_of_step(num_sequences: int, step: int, batch_size: int, seed: int) -> list[int]:
    """Return the indices of the sequences of optimizer step `step`; each sequence occurs once in an epoch."""
    numbers = range(step * batch_size, (step + 1) * batch_size)
    return [int(_order(num_sequences, seed, n // num_sequences)[n % num_sequences]) for n in numbers]


class Loop:
    """Takes optimizer steps and emits the record of each one.

    On CUDA the results of a step are read after the next step has been launched, so that the device is never idle: they
    are copied to pinned host memory before the step's end event, and reading them waits for that event alone.
    """

    def __init__(
        self,
        experiment: Experiment,
        sequences: Sequences,
        step: Step,
        optimizer: Optimizer,
        emit: Callable[[Message], None],
    ) -> None:
        self._settings, self._effective_batch_size = experiment.settings, experiment.effective_batch_size
        self._sequences, self.step, self.optimizer, self._emit = sequences, step, optimizer, emit
        on_cuda = step.device.type == "cuda"
        self._now: Callable[[], Any] = _event if on_cuda else time.perf_counter
        self._lag = 1 if on_cuda else 0
        self.num_launched = 0
        """Optimizer steps launched so far, those before it was resumed included."""
        self._num_before = 0
        self._seconds_per_position: list[float] = []

    def go_on_from(self, num_steps: int) -> None:
        """Count on from this number of optimizer steps, which were taken before."""
        self.num_launched = self._num_before = num_steps

    def window(self, number: int) -> Window:
        """Return this rank's micro-batches of optimizer step `number`, counted from 0, on the CPU.

        Those of the watched steps are as long as the longest sequence of the corpus, so that a run that cannot hold the
        largest micro-batch fails at once. They are not timed, and padding changes no loss.
        """
        rows = rows_of_step(len(self._sequences), number, self._effective_batch_size, self._settings.seed)
        size = self.step.micro_batch_size
        if number - self._num_before < WATCHED_STEPS:
            batches = split(self._sequences.batch(rows), len(rows), size)
        else:
            batches = self._sequences.micro_batches(rows, size)
        nums_tokens, nums_targets = zip(*map(self._sequences.count, batches), strict=True)
        num_positions = sum(map(self._sequences.num_positions, batches))
        return Window(self.step.ranks.own(batches), sum(nums_tokens), sum(nums_targets), num_positions)

    def advance(self, num_steps: int, mark: Callable[[int, str], None] = unmarked, stop: Stop = never_stop) -> None:
        """Take the next `num_steps` optimizer steps, fewer if `stop` returns True, and emit all of them.

        `mark` is called with the number of the step, counted from where it was resumed, and the phase at its end.

        Raises:
            DivergedError: a loss was infinite or NaN.

        """
        pending: deque[Callable[[], None]] = deque()
        start = self._now()
        for number in range(self.num_launched, self.num_launched + num_steps):
            window, rate, output = self.launch(mark)
            reserved = torch.cuda.memory_reserved(self.step.device) if self._lag else None
            if self._lag:
                output = output.to_host()
            end = self._now()
            pending.append(partial(self._read, number, window, rate, output, reserved, start, end))
            start = end
            if len(pending) > self._lag:
                pending.popleft()()
            if stop(self._seconds_per_position):
                break
        while pending:
            pending.popleft()()

    def launch(self, mark: Callable[[int, str], None] = unmarked) -> tuple[Window, float, StepOutput]:
        """Take the next optimizer step without waiting for the device; return its data, learning rate and results."""
        number, counted = self.num_launched, self.num_launched - self._num_before
        rate = learning_rate(number, self._settings, self._effective_batch_size)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        window = self.window(number)
        mark(counted, "data")
        output = optimizer_step(
            self.step,
            self.optimizer,
            window.batches,
            window.num_targets,
            self._settings.max_grad_norm,
            partial(mark, counted),
        )
        self.num_launched += 1
        return window, rate, output

    def _read(
        self,
        number: int,
        window: Window,
        rate: float,
        output: StepOutput,
        reserved_bytes: int | None,
        start: Any,
        end: Any,
    ) -> None:
        """Wait for the end of an optimizer step and emit its record."""
        [seconds] = self.step.ranks.largest([_seconds_between(start, end)])
        self._seconds_per_position.append(seconds / window.num_positions)
        loss, grad_norm = output.loss.item(), output.grad_norm.item()
        scaled = self.step.scaler.is_enabled()
        record = StepRecord(
            step=number,
            loss=loss,
            grad_norm=grad_norm,
            seconds=seconds,
            tokens=window.num_tokens,
            positions=window.num_positions,
            learning_rate=rate,
            loss_scale=output.loss_scale.item() if scaled else None,
            skipped=scaled and not math.isfinite(grad_norm),
            reserved_bytes=reserved_bytes,
        )
        if not math.isfinite(loss):
            raise DivergedError(f"the loss of optimizer step {number} is {loss}")
        self._emit(record)


def _event() -> torch.cuda.Event:
    """Return an event that is recorded on the current CUDA stream, which does not wait for the device."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds_between(start: Any, end: Any) -> float:
    """Return the time between two events, whose end it waits for, or between two times of the host's clock."""
    if isinstance(end, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


@lru_cache(maxsize=4)
def _order(num_sequences: int, seed: int, epoch: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.random.default_rng([seed, epoch]).permutation(num_sequences)
