"""The one training step and its loop; techniques change the Step, never the loop."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from pipeline.contracts import Batch, Finished, MemoryUse, Prepared, Sequences, Step, StepRecord
from pipeline.experiment import Experiment
from pipeline.memory.meter import WATCHED_STEPS, make_meter
from pipeline.settings import RunSettings

Message = StepRecord | MemoryUse | Finished
"""What a training run tells while it goes on."""

SMALLEST_FP16 = 2.0**-25
"""Half of fp16's smallest number: what is not greater rounds to zero (IEEE 754, ties to even)."""


Mark = Callable[[str], None]
"""Notes the end of a phase: `forward`, `backward` or `optimizer`."""


def unmarked(*_: object) -> None:
    """Note nothing."""


class DivergedError(ArithmeticError):
    """A loss was infinite or not a number."""


@dataclass(frozen=True)
class Taken:
    """What one optimizer step leaves on the device; reading it waits for the step to end."""

    loss: Tensor
    grad_norm: Tensor
    loss_scale: Tensor


def train(experiment: Experiment, prepared: Prepared, tell: Callable[[Message], None]) -> None:
    """Train, and tell each optimizer step, the memory used and what was measured at the end.

    Raises:
        DivergedError: a loss was infinite or not a number; the steps before it have been told.

    """
    settings = experiment.settings
    meter = make_meter(experiment.device)
    try:
        torch.manual_seed(settings.seed)
        step = build_step(experiment, prepared)
        meter.mark(0, "load")
        optimizer = make_optimizer(step.trainable.module, settings)
        with step.run_context():
            loop = _Loop(experiment, prepared.train, step, optimizer, tell)
            with _counted_layers(step.trainable.layers) as forwards:
                loop.advance(1, meter.mark)
            loop.advance(WATCHED_STEPS - 1, meter.mark)
            meter.settle()
            tell(meter.read())
            loop.advance(settings.num_steps - WATCHED_STEPS)
    finally:
        meter.settle()
        tell(meter.read())
    with step.run_context():
        eval_loss = evaluate(step, prepared.held_out, settings.eval_steps) if settings.eval_steps else None
        last = loop.window(settings.num_steps - 1)
        underflow = gradient_underflow_percent(step, optimizer, last) if settings.gradient_underflow else None
    tell(Finished(eval_loss=eval_loss, gradient_underflow_percent=underflow, block_forwards_per_step=len(forwards)))


def build_step(experiment: Experiment, prepared: Prepared) -> Step:
    """Return the Step of the model on its device, with every technique in place."""
    trainable = experiment.model.build(experiment.settings.model, prepared.vocabulary_size)
    trainable.module.to(experiment.device)
    step = Step(
        trainable=trainable,
        device=experiment.device,
        micro_batch_size=1,
        accumulation_steps=experiment.effective_batch_size,
        scaler=torch.amp.GradScaler(experiment.device.type, enabled=False),
    )
    for technique in experiment.techniques:
        step = technique.apply(step)
    return step


def make_optimizer(module: nn.Module, settings: RunSettings) -> Optimizer:
    """Return AdamW, fused: one kernel for all parameters on CUDA, one pass over each on a CPU."""
    return AdamW(module.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)


def take(
    step: Step,
    optimizer: Optimizer,
    window: Sequence[Batch],
    num_targets: int,
    max_grad_norm: float | None,
    mark: Mark = unmarked,
) -> Taken:
    """Take one optimizer step over a window of micro-batches, without waiting for the device.

    The loss is the window's summed loss over `num_targets`, the window's targets: the same for any cut into
    micro-batches, and never a mean of means. `mark` is called at the end of the last forward pass (`forward`), of
    the last backward pass (`backward`) and of the step (`optimizer`).
    """
    loss_scale = step.scaler.scale(torch.ones((), device=step.device))
    losses = backpropagate(step, window, num_targets, mark)
    step.scaler.unscale_(optimizer)
    grad_norm = clip_grad_norm_(step.trainable.module.parameters(), max_grad_norm or math.inf)
    step.scaler.step(optimizer)
    step.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    mark("optimizer")
    return Taken(torch.stack(losses).sum(), grad_norm, loss_scale)


def backpropagate(step: Step, window: Sequence[Batch], num_targets: int, mark: Mark = unmarked) -> list[Tensor]:
    """Run forward and backward over each micro-batch of a window; return each one's share of the window's loss."""
    losses = []
    for number, batch in enumerate(window, 1):
        batch = {name: tensor.to(step.device, non_blocking=True) for name, tensor in batch.items()}
        with step.forward_context():
            loss = step.trainable.loss(step.trainable.module, batch, num_targets)
        if number == len(window):
            mark("forward")
        step.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    mark("backward")
    return losses


def learning_rate(step: int, settings: RunSettings, effective_batch_size: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0."""
    ratio = effective_batch_size / settings.base_batch_size
    scale = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[settings.learning_rate_scaling]
    warmup = settings.learning_rate_warmup_steps
    if step < warmup:
        scale *= (step + 1) / warmup
    elif settings.learning_rate_schedule == "linear":
        scale *= (settings.num_steps - step) / (settings.num_steps - warmup)
    return settings.learning_rate * scale


def rows_of_step(num_sequences: int, step: int, batch_size: int, seed: int) -> list[int]:
    """Return the sequences of optimizer step `step`: the same for any micro-batch size, each once an epoch."""
    numbers = range(step * batch_size, (step + 1) * batch_size)
    return [int(_order(num_sequences, seed, n // num_sequences)[n % num_sequences]) for n in numbers]


def evaluate(step: Step, held_out: Sequences, eval_steps: int) -> float:
    """Return the mean loss over the targets of the first held-out sequences, `eval_steps` effective batches at most."""
    module = step.trainable.module
    count = min(len(held_out), eval_steps * step.micro_batch_size * step.accumulation_steps)
    total = torch.zeros((), device=step.device)
    num_targets = 0
    module.eval()
    with torch.no_grad():
        for start in range(0, count, step.micro_batch_size):
            batch = held_out.batch(range(start, min(start + step.micro_batch_size, count)))
            num_targets += held_out.count(batch)[1]
            with step.forward_context():
                total += step.trainable.loss(module, {k: v.to(step.device) for k, v in batch.items()}, 1)
    module.train()
    return total.item() / num_targets


def gradient_underflow_percent(step: Step, optimizer: Optimizer, window: "Window") -> float:
    """Return the share in percent of non-zero gradient elements that plain fp16 would round to zero."""
    backpropagate(step, window.batches, window.num_targets)
    step.scaler.unscale_(optimizer)
    sizes = [p.grad.abs() for p in step.trainable.module.parameters() if p.grad is not None]
    lost = sum(int(((size > 0) & (size <= SMALLEST_FP16)).sum()) for size in sizes)
    total = sum(int((size > 0).sum()) for size in sizes)
    optimizer.zero_grad(set_to_none=True)
    return 100 * lost / total if total else 0.0


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step."""

    batches: tuple[Batch, ...]
    num_tokens: int
    num_targets: int


class _Loop:
    """Takes optimizer steps, and tells each one's record once the device has finished it.

    On an accelerator a step is read after the next one has been launched, so that the device never waits for us.
    """

    def __init__(
        self,
        experiment: Experiment,
        sequences: Sequences,
        step: Step,
        optimizer: Optimizer,
        tell: Callable[[Message], None],
    ) -> None:
        self._settings, self._effective_batch_size = experiment.settings, experiment.effective_batch_size
        self._sequences, self._step, self._optimizer, self._tell = sequences, step, optimizer, tell
        self._clock: _CpuClock | _CudaClock = _CudaClock() if step.device.type == "cuda" else _CpuClock()
        self._lag = 1 if step.device.type == "cuda" else 0
        self._next = 0

    def window(self, number: int) -> Window:
        """Return the micro-batches of optimizer step `number`, on the CPU."""
        rows = rows_of_step(len(self._sequences), number, self._effective_batch_size, self._settings.seed)
        whole = self._sequences.batch(rows)
        size = self._step.micro_batch_size
        cuts = range(0, self._effective_batch_size, size)
        batches = tuple({name: tensor[cut : cut + size] for name, tensor in whole.items()} for cut in cuts)
        return Window(batches, *self._sequences.count(whole))

    def advance(self, num_steps: int, mark: Callable[[int, str], None] = unmarked) -> None:
        """Take the next `num_steps` optimizer steps and tell them all.

        Raises:
            DivergedError: a loss was infinite or not a number.

        """
        pending: deque[Callable[[], None]] = deque()
        start = self._clock.now()
        for number in range(self._next, self._next + num_steps):
            rate = learning_rate(number, self._settings, self._effective_batch_size)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            window = self.window(number)
            taken = take(
                self._step,
                self._optimizer,
                window.batches,
                window.num_targets,
                self._settings.max_grad_norm,
                partial(mark, number),
            )
            end = self._clock.now()
            pending.append(partial(self._read, number, window, rate, taken, start, end))
            start = end
            if len(pending) > self._lag:
                pending.popleft()()
        while pending:
            pending.popleft()()
        self._next += num_steps

    def _read(self, number: int, window: Window, rate: float, taken: Taken, start: Any, end: Any) -> None:
        seconds = self._clock.between(start, end)
        loss, grad_norm = taken.loss.item(), taken.grad_norm.item()
        scaled = self._step.scaler.is_enabled()
        record = StepRecord(
            step=number,
            loss=loss,
            grad_norm=grad_norm,
            seconds=seconds,
            tokens=window.num_tokens,
            learning_rate=rate,
            loss_scale=taken.loss_scale.item() if scaled else None,
            skipped=scaled and not math.isfinite(grad_norm),
        )
        if not math.isfinite(loss):
            raise DivergedError(f"the loss of optimizer step {number} is {loss}")
        self._tell(record)


class _CpuClock:
    """Moments as seconds."""

    def now(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        return end - start


class _CudaClock:
    """Moments as events in the device's own queue: noting one waits for nothing."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


@contextmanager
def _counted_layers(layers: tuple[nn.Module, ...]) -> Iterator[list[None]]:
    """Give a list that grows by one whenever a layer runs forward, recomputation included.

    A layer's own hooks stay outside of its checkpoint in some versions of transformers; its first child's never do.
    """
    forwards: list[None] = []
    handles = [next(layer.children()).register_forward_pre_hook(lambda *_: forwards.append(None)) for layer in layers]
    try:
        yield forwards
    finally:
        for handle in handles:
            handle.remove()


@lru_cache(maxsize=4)
def _order(num_sequences: int, seed: int, epoch: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.random.default_rng([seed, epoch]).permutation(num_sequences)
