"""Gradients that meet: the recorder counts their sum as autograd makes it when nothing records."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipeline.memory.meter import make_meter
from pipeline.memory.recorder import LifetimeRecorder

ROWS, COLUMNS = 1000, 256
BYTES = ROWS * COLUMNS * 4


def of_their_own(weight: Tensor) -> Tensor:
    """Make two gradients that nobody else holds: they are added up in place."""
    return (weight * 2).sum() + (weight * 3).sum()


def views(weight: Tensor) -> Tensor:
    """Make two gradients that are views of what a product made: their sum needs memory of its own."""
    few = torch.ones(2, ROWS)
    return (few @ weight.t().t()).sum() + (few @ weight.t().t()).sum()


def shared(weight: Tensor) -> Tensor:
    """Make gradients of which the first is needed elsewhere as well, as in a residual connection."""
    inner = weight * 2
    return (inner + (inner * 3)).mul(5).sum()


@pytest.mark.parametrize("loss", [of_their_own, views, shared], ids=lambda loss: loss.__name__)
def test_a_sum_of_gradients_needs_what_the_allocator_says(loss: Callable[[Tensor], Tensor]) -> None:
    cpu = torch.device("cpu")
    recorder = LifetimeRecorder(cpu)
    with recorder:
        loss(torch.ones(ROWS, COLUMNS, requires_grad=True)).backward()
    meter = make_meter(cpu)
    loss(torch.ones(ROWS, COLUMNS, requires_grad=True)).backward()
    meter.stop()
    measured = meter.read().peak_allocated_bytes
    assert max(recorder.timeline().allocated_bytes) == pytest.approx(measured, abs=BYTES // 8)
