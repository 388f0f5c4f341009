"""The optimizer step, shared by training and prediction; techniques change the Step, not this code."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from pipeline.base.contracts import Batch, Prepared, Sequences, Trainable
from pipeline.base.ranks import CollectiveEntered, Ranks, whole
from pipeline.base.technique import Stage, Step
from pipeline.config.experiment import Experiment
from pipeline.config.settings import RunSettings
from pipeline.techniques._support.data_parallel import refuse_other_weights

SMALLEST_FP16 = 2.0**-25
"""Half of fp16's smallest positive number: this and all smaller values round to zero (IEEE 754, ties to even)."""

Mark = Callable[[str], None]
"""Called with a phase at its end: `data`, `forward`, `backward` or `optimizer`."""


def unmarked(*_: object) -> None:
    """Do nothing at the end of a phase."""


@dataclass(frozen=True)
class StepOutput:
    """The results of one optimizer step, tensors of one element; reading one on the device waits for all its work."""

    loss: Tensor
    grad_norm: Tensor
    """Before clipping; NaN where the optimizer has freed the gradients in the backward pass."""
    loss_scale: Tensor

    def to_host(self) -> "StepOutput":
        """Queue copies to pinned host memory on the device and return them; they hold the values once they are done."""
        tensors = (self.loss, self.grad_norm, self.loss_scale)
        return StepOutput(*(tensor.to("cpu", non_blocking=True) for tensor in tensors))


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step: this rank's, with the numbers of all ranks."""

    batches: tuple[Batch, ...]
    num_tokens: int
    """Without padding."""
    num_targets: int
    num_positions: int
    """Tokens with padding."""


Build = Callable[[Experiment, Prepared, Ranks], Step]
"""Builds the model on the CPU, and returns its Step with the parameters that it trains."""


def built(experiment: Experiment, prepared: Prepared, ranks: Ranks) -> Step:
    """Build the model on the CPU, and return its Step with the parameters that it trains."""
    trainable = experiment.model.build(experiment.settings.model, prepared.vocabulary_size)
    return with_parameters(experiment, trainable, ranks)


def with_parameters(experiment: Experiment, trainable: Trainable, ranks: Ranks) -> Step:
    """Return the Step of a model that was built, with the techniques applied that decide its parameters."""
    step = Step(
        trainable=trainable,
        device=experiment.device,
        micro_batch_size=1,
        accumulation_steps=experiment.effective_batch_size,
        scaler=torch.amp.GradScaler(experiment.device.type, enabled=False),
        make_optimizer=partial(make_optimizer, settings=experiment.settings),
        ranks=ranks,
    )
    for technique in experiment.techniques:
        if technique.stage <= Stage.ADAPTER:
            step = technique.apply(step)
    return step


def ranks_of(experiment: Experiment, emit: Callable[[CollectiveEntered], Any] = lambda _: None) -> Ranks:
    """Return the processes that train together."""
    return Ranks(experiment.world_size, emit, experiment.tensor_parallel)


def build_step(experiment: Experiment, prepared: Prepared, build: Build = built, ranks: Ranks | None = None) -> Step:
    """Build the model and return its Step, with every technique applied, for this process as one of `ranks`.

    The last of them moves the model to its device.
    """
    step = build(experiment, prepared, ranks or ranks_of(experiment))
    refuse_other_weights(step.trainable.module, step.ranks)
    for technique in experiment.techniques:
        if technique.stage > Stage.ADAPTER:
            step = technique.apply(step)
    return replace(step, make_optimizer=partial(_finished_optimizer, step))


def _finished_optimizer(step: Step, module: nn.Module) -> Optimizer:
    """Return the optimizer that the techniques have made and changed."""
    optimizer = step.make_optimizer(module)
    step.change_optimizer(optimizer)
    return optimizer


def make_optimizer(module: nn.Module, settings: RunSettings) -> Optimizer:
    """Return fused AdamW over the parameters that are trained: the optimizer unless a technique replaces it."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return AdamW(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)


def optimizer_step(
    step: Step,
    optimizer: Optimizer,
    window: Sequence[Batch],
    num_targets: int,
    max_grad_norm: float | None,
    mark: Mark = unmarked,
) -> StepOutput:
    """Take one optimizer step over a window of micro-batches, without waiting for the device.

    The loss is the window's summed loss divided by `num_targets`, the targets of the whole window, so it does not
    depend on the micro-batch size; with several ranks it is the sum of all. `mark` is called at the end of each forward
    pass (`forward`), of each backward pass (`backward`) and of the step (`optimizer`).
    """
    loss_scale = step.scaler.scale(torch.ones((), device=step.device))
    loss = backpropagate(step, window, num_targets, mark)
    with torch.no_grad():  # the scaler makes tensors of its own, which belong to no forward pass
        step.scaler.unscale_(optimizer)
    grad_norm = _clip_gradients(step, max_grad_norm)
    step.scaler.step(optimizer)
    step.scaler.update()
    step.zero_gradients(optimizer)
    mark("optimizer")
    step.ranks.add(loss)
    return StepOutput(loss, grad_norm, loss_scale)


def backpropagate(step: Step, window: Sequence[Batch], num_targets: int, mark: Mark = unmarked) -> Tensor:
    """Run forward and backward passes over a window's micro-batches; return the sum of their losses, in float32.

    It is added up pass by pass, so that further passes need no memory of their own.
    """
    total: Tensor | None = None
    for number, batch in enumerate(window):
        batch = {name: tensor.to(step.device, non_blocking=True) for name, tensor in batch.items()}
        is_last = number == len(window) - 1
        step.ranks.entered()  # as progress: a step of many passes may take longer than any operation
        with nullcontext() if is_last else step.accumulation_context(), step.forward_context():
            loss = step.trainable.loss(step.trainable.module, batch, num_targets)
        mark("forward")
        step.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        share = loss.detach().float()
        total = share if total is None else total + share
        del loss, share  # whose graph holds inputs with gradients of their own, such as those of a frozen embedding
        mark("backward")
    assert total is not None  # a window has a micro-batch
    return total


@torch.no_grad()
def _clip_gradients(step: Step, max_grad_norm: float | None) -> Tensor:
    """Clip the gradients to a norm of `max_grad_norm`; return the norm before, or NaN if no gradients are left."""
    parameters = [parameter for parameter in step.trainable.module.parameters() if parameter.grad is not None]
    if not parameters:
        return torch.full((), math.nan, device=step.device)
    return whole(clip_grad_norm_(parameters, max_grad_norm or math.inf))


def evaluate(step: Step, held_out: Sequences, eval_steps: int) -> float:
    """Return the mean loss per target over the first held-out sequences, at most `eval_steps` effective batches."""
    module = step.trainable.module
    effective_batch_size = step.micro_batch_size * step.accumulation_steps * step.ranks.num_data_ranks
    count = min(len(held_out), eval_steps * effective_batch_size)
    total = torch.zeros((), device=step.device)
    num_targets = 0
    module.eval()
    with torch.no_grad():
        for start in range(0, count, effective_batch_size):
            rows = range(start, min(start + effective_batch_size, count))
            batches = held_out.micro_batches(rows, step.micro_batch_size)
            num_targets += sum(held_out.count(batch)[1] for batch in batches)
            for batch, counts in step.ranks.own_of_each_pass(batches):
                step.ranks.entered()
                with step.forward_context():
                    loss = step.trainable.loss(module, {k: v.to(step.device) for k, v in batch.items()}, 1)
                total += loss if counts else 0
    step.ranks.add(total)
    module.train()
    return total.item() / num_targets


def gradient_underflow_percent(step: Step, optimizer: Optimizer, window: Window) -> float:
    """Return the percentage of non-zero gradient elements that fp16 without loss scaling would round to zero."""
    backpropagate(step, window.batches, window.num_targets)
    step.scaler.unscale_(optimizer)
    lost = total = 0
    for gradient in (whole(p.grad) for p in step.trainable.module.parameters() if p.grad is not None):
        size = gradient.abs()
        lost += int(((size > 0) & (size <= SMALLEST_FP16)).sum())
        total += int((size > 0).sum())
    step.zero_gradients(optimizer)
    return 100 * lost / total if total else 0.0


@contextmanager
def counted_layers(layers: tuple[nn.Module, ...]) -> Iterator[list[None]]:
    """Yield a list that gets one element for each forward pass of a layer, recomputation included.

    The hooks are on each layer's first child: in some versions of transformers a checkpoint is inside the layer. Of a
    layer without children recomputation is not counted. A hook would be compiled with a compiled layer, and make it
    another one: calls of its compiled function are counted.
    """
    forwards: list[None] = []
    with ExitStack() as stack:
        for layer in layers:
            if layer._compiled_call_impl is None:
                hook = next(layer.children(), layer).register_forward_pre_hook(lambda *_: forwards.append(None))
                stack.callback(hook.remove)
            else:
                counted = _counted(layer._compiled_call_impl, forwards)
                stack.enter_context(patch.object(layer, "_compiled_call_impl", counted))
        yield forwards


def _counted(call: Callable[..., Any], calls: list[None]) -> Callable[..., Any]:
    """Return a function that appends to `calls` each time it is called."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return call(*args, **kwargs)

    return counted
