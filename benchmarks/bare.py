"""The training of `main` as a bare PyTorch loop: no techniques, no marks, no records, no tracking.

    python benchmarks/bare.py config.yaml            prints, as JSON, each step's loss and seconds
    python benchmarks/bare.py config.yaml --metered  prints the peak of the allocated bytes, too

On a CPU a metered run takes two steps, which are slow. The file is the config.yaml of a run of `main` in fp32 or bf16,
with all layers checkpointed or none. Model, weights and sequences are those of that run; the loop is what a
user would write by hand to train only.
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from pipeline.base.contracts import Batch
from pipeline.config.experiment import Experiment
from pipeline.config.variants import load_single
from pipeline.data._support.sequences import IGNORED_LABEL
from pipeline.memory.meter import WATCHED_STEPS, make_meter
from pipeline.training.loop import rows_of_step


def main() -> None:
    """Train in this process, and print what was measured."""
    config, *words = sys.argv[1:]
    print(json.dumps(run(load_single("main", {"config": config}).variants[0].experiment, bool(words))))


def run(experiment: Experiment, metered: bool) -> dict[str, Any]:
    """Return `losses` and `seconds` of each step and, of a metered run, `peak_allocated_bytes`."""
    settings, prepared = experiment.settings, experiment.prepare()
    num_steps = WATCHED_STEPS if metered and experiment.device.type == "cpu" else settings.num_steps
    num_rows, batch_size = len(prepared.train), experiment.effective_batch_size
    orders = [rows_of_step(num_rows, number, batch_size, settings.seed) for number in range(num_steps)]
    size = experiment.settings.micro_batch_size
    windows = [[prepared.train.batch(o[cut : cut + size]) for cut in range(0, batch_size, size)] for o in orders]
    meter = make_meter(experiment.device) if metered else None
    torch.manual_seed(settings.seed)
    module = experiment.model.build(settings.model, prepared.vocabulary_size).module.to(experiment.device)
    losses, moments = train(module, windows, experiment)
    if experiment.device.type == "cuda":
        torch.cuda.synchronize()
        seconds = [start.elapsed_time(end) / 1000 for start, end in pairwise(moments)]
    else:
        seconds = [end - start for start, end in pairwise(moments)]
    measured: dict[str, Any] = {"losses": [torch.stack(shares).sum().item() for shares in losses], "seconds": seconds}
    if meter is not None:
        meter.stop()
        measured["peak_allocated_bytes"] = meter.read().peak_allocated_bytes
    return measured


def train(
    module: nn.Module, windows: Iterable[Sequence[Batch]], experiment: Experiment
) -> tuple[list[list[Tensor]], list[Any]]:
    """Take one optimizer step for each window of micro-batches.

    Return each window's losses, whose sum is its mean over all targets, and the clock before and after each step.
    """
    settings, device = experiment.settings, experiment.device
    if settings.checkpointing == "every_layer":
        checkpoint_layers(module)
    optimizer = AdamW(module.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    losses, moments = [], [moment(device)]
    for number, window in enumerate(windows):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (number + 1) / settings.learning_rate_warmup_steps)
        num_targets = sum(targets_in(batch) for batch in window)
        shares = []
        for batch in window:
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
                loss = loss_of(module, batch, num_targets)
            loss.backward()
            shares.append(loss.detach())
        clip_grad_norm_(module.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(shares)
        moments.append(moment(device))
    return losses, moments


def checkpoint_layers(module: Any) -> None:
    """Checkpoint every layer of a model of transformers, by the method that its version of transformers has."""
    new = getattr(module, "activation_checkpointing_enable", None)
    (new or module.gradient_checkpointing_enable)({"use_reentrant": False})


def targets_in(batch: Batch) -> int:
    """Return how many targets a batch on the CPU has: labels that are not padding, without each row's first."""
    return int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())


def loss_of(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
    """Return the summed cross-entropy over `num_targets`; the logits are freed here, before the backward pass."""
    logits_BTV = module(input_ids=batch["input_ids"], use_cache=False).logits.float()
    targets_BT = F.pad(batch["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:]
    total = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return total / num_targets


def moment(device: torch.device) -> Any:
    """Return the clock on a CPU, and on CUDA an event in the device's queue, as the entry point's clocks do."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


if __name__ == "__main__":
    main()
