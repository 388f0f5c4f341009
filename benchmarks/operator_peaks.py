"""Predicted peaks of the operators of benchmarks/published/liger_a100.csv."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from replayed import served
from torch import Tensor, nn

from pipeline.base.contracts import Hardware
from pipeline.memory.allocator import CachingAllocator
from pipeline.memory.recorder import LifetimeRecorder
from pipeline.prediction.fake_card import CARD
from pipeline.prediction.fake_device import simulated
from pipeline.prediction.workspaces import WorkspaceTable

NUM_TOKENS = 8 * 2048
WIDTH, VOCABULARY_SIZE = 4096, 128256
ITERATIONS = 3
"""The first has no gradients yet; the published figure is the median of ten."""


@dataclass(frozen=True, kw_only=True)
class OperatorRun:
    """One row: an operator and the size that varies."""

    kernel: str
    x: int


def peak_allocated_bytes(run: OperatorRun, target: Hardware) -> int:
    """Return the peak of a forward and backward pass to which gradients of earlier ones are added."""
    make = {"cross_entropy": _cross_entropy, "fused_linear_cross_entropy": _linear_cross_entropy}[run.kernel]
    with simulated(target) as mode, LifetimeRecorder(CARD, WorkspaceTable(target), mode.run) as recorder:
        loss = make(run.x)
        recorder.mark(0, "load")
        for iteration in range(ITERATIONS):
            loss().backward()
            recorder.mark(iteration, "optimizer")
        timeline = recorder.timeline()
    allocator = CachingAllocator()
    phases = {span.begin: (span.step, span.phase) for span in timeline.spans}
    last = ITERATIONS - 1
    return max(allocator.allocated_bytes for _, (step, _) in served(timeline, allocator, phases) if step == last)


def _cross_entropy(vocabulary_size: int) -> Callable[[], Tensor]:
    logits = torch.empty((NUM_TOKENS, vocabulary_size), device=CARD, requires_grad=True)
    targets = torch.empty((NUM_TOKENS, 1), dtype=torch.long, device=CARD).squeeze(1)
    return lambda: nn.functional.cross_entropy(logits, targets)


def _linear_cross_entropy(num_tokens: int) -> Callable[[], Tensor]:
    inputs = torch.empty((num_tokens, WIDTH), dtype=torch.bfloat16, device=CARD, requires_grad=True)
    targets = torch.empty((num_tokens, 1), dtype=torch.long, device=CARD).squeeze(1)
    heads = [nn.Linear(WIDTH, VOCABULARY_SIZE, bias=False, dtype=torch.bfloat16, device=CARD) for _ in range(2)]
    return lambda: nn.functional.cross_entropy(heads[0](inputs), targets)  # the script made a head for each variant
