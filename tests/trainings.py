"""Trainings in the process of a test: a step with its loop, a plain loop of torch, and peaks that are predicted."""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from conftest import CPU, tiny
from test_prediction import measured
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from pipeline.base.contracts import Trainable
from pipeline.base.results import MemoryUse, StepRecord
from pipeline.base.technique import Step
from pipeline.config.experiment import Experiment
from pipeline.prediction.predict import predict
from pipeline.training.loop import Loop, Message, learning_rate, train
from pipeline.training.step import build_step

CUTS = [(8, 1), (4, 2), (2, 4), (1, 8)]
"""Micro-batch sizes and accumulation steps of the same effective batch."""
SMALL_BATCH: dict[str, Any] = {"sequence_length": 8, "micro_batch_size": 1, "effective_batch_size": 1, "eval_steps": 0}
"""Parameters, gradients and optimizer state are most of the peak."""


def nobody(_: object) -> None:
    """Receive an event, and forget it."""


def loop_of(experiment: Experiment, emit: Callable[[Message], None] = nobody) -> tuple[Step, Loop]:
    """Return the step of a training, with the weights that its seed draws, and the loop that takes it."""
    prepared = experiment.prepare()
    torch.manual_seed(experiment.settings.seed)
    step = build_step(experiment, prepared)
    return step, Loop(experiment, prepared.train, step, step.make_optimizer(step.trainable.module), emit)


def trained(experiment: Experiment, num_steps: int = 10) -> tuple[Trainable, Loop, list[StepRecord]]:
    """Return the model after some optimizer steps, the loop that has taken them, and its records."""
    records: list[Any] = []
    step, loop = loop_of(experiment, records.append)
    with step.run_context():
        loop.advance(num_steps)
    return step.trainable, loop, records


def steps_and_peak(experiment: Experiment) -> tuple[list[StepRecord], int]:
    """Train as a run does; return the optimizer steps and the peak."""
    messages: list[Message] = []
    gc.collect()  # what an earlier test left must not be freed while the meter counts
    train(experiment, experiment.prepare(), messages.append)
    peak = [message for message in messages if isinstance(message, MemoryUse)][-1].peak_allocated_bytes
    assert peak is not None
    return [message for message in messages if isinstance(message, StepRecord)], peak


def steps_of(experiment: Experiment) -> list[StepRecord]:
    """Train as a run does, and return the optimizer steps."""
    return steps_and_peak(experiment)[0]


def losses(experiment: Experiment, num_steps: int = 10) -> list[float]:
    """Return the losses of the first optimizer steps."""
    return [record.loss for record in trained(experiment, num_steps)[2]]


def check_same(steps: Sequence[StepRecord], wanted: Sequence[StepRecord]) -> None:
    """Check that optimizer steps are those of the same training."""
    for one, same in zip(wanted, steps, strict=True):
        assert same.loss == pytest.approx(one.loss, rel=1e-5)
        assert same.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert same.tokens == one.tokens


def check_cuts(**settings: Any) -> None:
    """Check that ten optimizer steps are the same for any micro-batch size."""
    runs = [steps_of(tiny(**settings, num_steps=10, micro_batch_size=size, accumulation_steps=n)) for size, n in CUTS]
    assert len(runs[0]) == 10
    for other in runs[1:]:
        check_same(other, runs[0])


def adamw(module: nn.Module) -> list[Optimizer]:
    """Return torch's AdamW of what is trained."""
    return [AdamW([one for one in module.parameters() if one.requires_grad], weight_decay=0.01, fused=True)]


def plainly_trained(
    experiment: Experiment,
    loop: Loop,
    num_steps: int,
    change: Callable[[nn.Module], Any] = lambda module: module,
    optimizers: Callable[[nn.Module], Iterable[Optimizer]] = adamw,
) -> tuple[nn.Module, list[float], list[float]]:
    """Return a changed model after a loop of torch alone on the same micro-batches, its losses and gradient norms."""
    settings: Any = experiment.settings
    torch.manual_seed(settings.seed)
    plain = experiment.model.build(settings.model, experiment.prepare().vocabulary_size)
    module = change(plain.module)
    made, found, norms = optimizers(module), list[float](), list[float]()
    for number in range(num_steps):
        window = loop.window(number)
        total = torch.zeros(())
        for batch in window.batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bf16"):
                loss = plain.loss(module, batch, window.num_targets)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norms.append(clip_grad_norm_(module.parameters(), 1.0).item())
        for optimizer in made:
            optimizer.param_groups[0]["lr"] = learning_rate(number, settings, 8)
            optimizer.step()
            optimizer.zero_grad()
        found.append(total.item())
    return module, found, norms


def check_peak(experiment: Experiment, error: float = 1e-4, error_bytes: float = 0.0) -> int:
    """Check that the peak of a training on a CPU is predicted, and return it."""
    peak = measured(experiment)
    assert predict(experiment, CPU).peak_allocated_bytes == pytest.approx(peak, rel=error, abs=error_bytes)
    return peak


def check_peak_on_card(card: Any, settings: Mapping[str, Any], error_of_reserved: float | None = None) -> None:
    """Check that the peak of a training on the card of this process is predicted."""
    predicted, real = (card.ask(kind=kind, settings=settings) for kind in ("predict", "measure"))
    assert real["outcome"] == "ok"
    assert predicted["predicted_allocated_bytes"] == pytest.approx(real["measured_allocated_bytes"], rel=5e-4)
    if error_of_reserved is not None:
        reserved = pytest.approx(real["measured_reserved_bytes"], rel=error_of_reserved)
        assert predicted["predicted_reserved_bytes"] == reserved
