"""One run of one peer in a process of its own: the same weights, rows, clock and meter for all.

The clock is read at the end of each step of the optimizer, by a hook that torch calls for any optimizer; a step's time
is that from the step before it, reading its rows included. On a CPU the meter watches the first two optimizer steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import bare
import torch
from frameworks import loader, windows, with_accelerate, with_lightning, with_trainer
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeline.base.contracts import Prepared
from pipeline.base.results import Result, StepRecord
from pipeline.config.experiment import Experiment
from pipeline.memory.device import occupy
from pipeline.memory.meter import WATCHED_STEPS, make_meter
from pipeline.runtime.fork_server import CONTEXT, SERVED
from pipeline.runtime.observer import Observer
from pipeline.runtime.run import execute
from pipeline.training.loop import rows_of_step, train

CONTEXT.set_forkserver_preload([*SERVED, "frameworks", "transformers.trainer", "accelerate", "lightning.pytorch"])


@dataclass(frozen=True)
class Measured:
    """The measurements of a run, except its memory."""

    losses: tuple[float, ...]
    """Of every optimizer step: the sum of its forward passes' losses, each divided as its framework does."""
    seconds: tuple[float, ...]
    """Of every optimizer step but the first."""
    tokens: tuple[int, ...]
    """Of every optimizer step, without padding."""
    targets: tuple[int, ...]
    """Of every optimizer step: those of its tokens that have one before them in their row."""
    first_mean_of_means: float | None
    """The first step's loss as the mean of its forward passes' means, of a loop that divides by the targets."""


def with_bare_loop(module: nn.Module, experiment: Experiment, prepared: Prepared) -> list[Tensor]:
    """Train in the bare loop, on rows from the same data loader."""
    batches = windows(iter(loader(experiment, prepared)), experiment.settings.accumulation_steps)
    return [loss for window in bare.train(module, batches, experiment)[0] for loss in window]


BARE = "bare loop"
FITPROOF = "Fitproof"
OTHERS: dict[str, Callable[[nn.Module, Experiment, Prepared], list[Tensor]]] = {
    BARE: with_bare_loop,
    "Trainer": with_trainer,
    "Accelerate": with_accelerate,
    "Lightning": with_lightning,
}
PEERS = (FITPROOF, *OTHERS)


class Messages(Observer):
    """The messages of a run."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def message(self, message: Any) -> None:
        """Receive a message."""
        self.all.append(message)


def run(peer: str, experiment: Experiment, log_file: Path) -> tuple[Result, Measured | None]:
    """Train in a fresh process; return its outcome, and the measurements if it completed."""
    received = Messages()
    result = execute(experiment, log_file, [received], work=partial(measure, peer))
    return result, received.all[-1] if result.outcome.completed else None


def measure(peer: str, experiment: Experiment, prepared: Prepared, emit: Callable[[Any], None]) -> None:
    """Train in this process; emit the memory used and a Measured."""
    moments: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda *_: moments.append(bare.moment(experiment.device)))
    try:
        work = _with_fitproof if peer == FITPROOF else partial(_with_other, peer)
        losses, mean_of_means = work(experiment, prepared, emit)
    finally:
        hook.remove()
    if len(moments) != experiment.settings.num_steps:
        raise RuntimeError(f"{peer} must take {experiment.settings.num_steps} optimizer steps, and took {len(moments)}")
    tokens, targets = zip(*counts(experiment, prepared), strict=True)
    emit(Measured(tuple(losses), seconds_between(moments), tokens, targets, mean_of_means))


def _with_fitproof(
    experiment: Experiment, prepared: Prepared, emit: Callable[[Any], None]
) -> tuple[list[float], float | None]:
    """Train as `main` does, and emit each step's record to the process that tracks it."""
    losses = []

    def keep(message: Any) -> None:
        if isinstance(message, StepRecord):
            losses.append(message.loss)
        emit(message)

    train(experiment, prepared, keep)
    return losses, None


def _with_other(
    peer: str, experiment: Experiment, prepared: Prepared, emit: Callable[[Any], None]
) -> tuple[list[float], float | None]:
    settings = experiment.settings
    meter = make_meter(experiment.device)
    occupy(experiment.device, experiment.budget_bytes)
    torch.manual_seed(settings.seed)
    module = experiment.model.build(settings.model, prepared.vocabulary_size).module.to(experiment.device)
    num_taken = 0

    def settle(*_: object) -> None:
        nonlocal num_taken
        num_taken += 1
        if num_taken == WATCHED_STEPS:
            meter.stop()

    hook = register_optimizer_step_post_hook(settle)
    try:
        parts = torch.stack(OTHERS[peer](module, experiment, prepared)).view(settings.num_steps, -1).cpu()
    finally:
        hook.remove()
        meter.stop()
    emit(meter.read())
    return parts.sum(1).tolist(), _mean_of_means(parts[0], experiment, prepared) if peer == BARE else None


def _mean_of_means(parts: Tensor, experiment: Experiment, prepared: Prepared) -> float:
    """Return the mean of the micro-batches' mean losses; `parts` are their shares of the first window's loss."""
    cuts = windows(iter(loader(experiment, prepared)), experiment.settings.accumulation_steps)
    counts = torch.tensor([bare.targets_in(batch) for batch in next(cuts)])
    return float((parts * counts.sum() / counts).mean())


def seconds_between(moments: list[Any]) -> tuple[float, ...]:
    """Return the seconds between moments of bare.moment()."""
    if isinstance(moments[0], float):
        return tuple(end - start for start, end in pairwise(moments))
    torch.cuda.synchronize()
    return tuple(start.elapsed_time(end) / 1000 for start, end in pairwise(moments))


def counts(experiment: Experiment, prepared: Prepared) -> Iterator[tuple[int, int]]:
    """Yield every optimizer step's tokens without padding, and its targets."""
    settings, sequences = experiment.settings, prepared.train
    for number in range(settings.num_steps):
        rows = rows_of_step(len(sequences), number, experiment.effective_batch_size, settings.seed)
        yield sequences.count(sequences.batch(rows))
