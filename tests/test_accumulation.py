"""Sums of gradients: the recorder counts the memory that autograd uses for them without a recorder."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipeline.memory.meter import make_meter
from pipeline.memory.recorder import LifetimeRecorder

ROWS, COLUMNS = 1000, 256
BYTES = ROWS * COLUMNS * 4


def unshared(weight: Tensor) -> Tensor:
    """Make two gradients without other references: they are added in place."""
    return (weight * 2).sum() + (weight * 3).sum()


def views(weight: Tensor) -> Tensor:
    """Make two gradients that are views of products: their sum is another tensor."""
    few = torch.ones(2, ROWS)
    return (few @ weight.t().t()).sum() + (few @ weight.t().t()).sum()


def shared(weight: Tensor) -> Tensor:
    """Make gradients of which the first has another reference, as in a residual connection."""
    inner = weight * 2
    return (inner + (inner * 3)).mul(5).sum()


@pytest.mark.parametrize("loss", [unshared, views, shared], ids=lambda loss: loss.__name__)
def test_the_recorded_peak_of_a_sum_of_gradients_is_the_allocators(loss: Callable[[Tensor], Tensor]) -> None:
    cpu = torch.device("cpu")
    recorder = LifetimeRecorder(cpu)
    with recorder:
        loss(torch.ones(ROWS, COLUMNS, requires_grad=True)).backward()
    meter = make_meter(cpu)
    loss(torch.ones(ROWS, COLUMNS, requires_grad=True)).backward()
    meter.stop()
    measured = meter.read().peak_allocated_bytes
    assert max(recorder.timeline().allocated_bytes_E) == pytest.approx(measured, abs=BYTES // 8)


def test_a_sum_that_autograd_computes_in_place_allocates_nothing() -> None:
    """A release and a new allocation would have the same peak, but the caching allocator may place it elsewhere."""
    recorder = LifetimeRecorder(torch.device("cpu"))
    weight = torch.ones(ROWS, COLUMNS, requires_grad=True)
    with recorder:
        unshared(weight).backward()
    timeline = recorder.timeline()
    products = [number for number, one in enumerate(timeline.storages) if one.num_bytes == BYTES]
    operators = [timeline.storages[number].operator for number in products]
    assert operators == ["mul"] * 4, "two products, and the gradient of each"
    assert products[2] in timeline.alive(len(timeline.events_E) - 1), (
        "the first gradient has become the sum, which is weight.grad"
    )
