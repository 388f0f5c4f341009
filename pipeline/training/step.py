"""The one training step: training runs it on real tensors; techniques change the Step, never this code."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from pipeline.base.contracts import Batch, Prepared, Sequences, Step, Trainable
from pipeline.config.experiment import Experiment
from pipeline.config.settings import RunSettings

SMALLEST_FP16 = 2.0**-25
"""Half of fp16's smallest number: what is not greater rounds to zero (IEEE 754, ties to even)."""

Mark = Callable[[str], None]
"""Notes the end of a phase: `data`, `forward`, `backward` or `optimizer`."""


def unmarked(*_: object) -> None:
    """Note nothing."""


@dataclass(frozen=True)
class StepOutput:
    """What one optimizer step leaves on the device; reading it waits for the step to end."""

    loss: Tensor
    grad_norm: Tensor
    loss_scale: Tensor


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step."""

    batches: tuple[Batch, ...]
    num_tokens: int
    num_targets: int


Build = Callable[[Experiment, Prepared], Trainable]
"""Makes the model on its device."""


def on_device(experiment: Experiment, prepared: Prepared) -> Trainable:
    """Return the model, built on the CPU and moved to its device."""
    trainable = experiment.model.build(experiment.settings.model, prepared.vocabulary_size)
    if experiment.device.type != "cpu":
        trainable.module.to(experiment.device)
    return trainable


def build_step(experiment: Experiment, prepared: Prepared, build: Build = on_device) -> Step:
    """Return the Step of the model on its device, with every technique in place."""
    trainable = build(experiment, prepared)
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


def optimizer_step(
    step: Step,
    optimizer: Optimizer,
    window: Sequence[Batch],
    num_targets: int,
    max_grad_norm: float | None,
    mark: Mark = unmarked,
) -> StepOutput:
    """Take one optimizer step over a window of micro-batches, without waiting for the device.

    The loss is the window's summed loss over `num_targets`, the window's targets: the same for any cut into
    micro-batches, and never a mean of means. `mark` is called at the end of each forward pass (`forward`), of each
    backward pass (`backward`) and of the step (`optimizer`).
    """
    loss_scale = step.scaler.scale(torch.ones((), device=step.device))
    losses = backpropagate(step, window, num_targets, mark)
    step.scaler.unscale_(optimizer)
    grad_norm = clip_grad_norm_(step.trainable.module.parameters(), max_grad_norm or math.inf)
    step.scaler.step(optimizer)
    step.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    mark("optimizer")
    return StepOutput(torch.stack(losses).sum(), grad_norm, loss_scale)


def backpropagate(step: Step, window: Sequence[Batch], num_targets: int, mark: Mark = unmarked) -> list[Tensor]:
    """Run forward and backward over each micro-batch of a window; return each one's share of the window's loss."""
    losses = []
    for batch in window:
        batch = {name: tensor.to(step.device, non_blocking=True) for name, tensor in batch.items()}
        with step.forward_context():
            loss = step.trainable.loss(step.trainable.module, batch, num_targets)
        mark("forward")
        step.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        mark("backward")
    return losses


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


def gradient_underflow_percent(step: Step, optimizer: Optimizer, window: Window) -> float:
    """Return the share in percent of non-zero gradient elements that plain fp16 would round to zero."""
    backpropagate(step, window.batches, window.num_targets)
    step.scaler.unscale_(optimizer)
    sizes = [p.grad.abs() for p in step.trainable.module.parameters() if p.grad is not None]
    lost = sum(int(((size > 0) & (size <= SMALLEST_FP16)).sum()) for size in sizes)
    total = sum(int((size > 0).sum()) for size in sizes)
    optimizer.zero_grad(set_to_none=True)
    return 100 * lost / total if total else 0.0


@contextmanager
def counted_layers(layers: tuple[nn.Module, ...]) -> Iterator[list[None]]:
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
