"""What bfloat16 matrix products take on a CPU besides their results, in recorded and in extrapolated predictions."""

from contextlib import nullcontext

import pytest
import torch
from conftest import tiny
from test_prediction import CPU

from pipeline.memory.inside import NOTHING
from pipeline.prediction import cpu_products
from pipeline.prediction.cpu_products import scratchpad
from pipeline.prediction.predict import predict
from pipeline.prediction.trace import record

aten = torch.ops.aten


def bytes_seen(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """Return what torch's allocator allocates for a product, in order."""
    with torch.profiler.profile(profile_memory=True) as profiled:
        product = a @ b
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    del product
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()) if event.nbytes() > 0]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_scratchpad_is_what_the_product_takes(transposed: bool) -> None:
    a = torch.ones(48, 64, dtype=torch.bfloat16).t() if transposed else torch.ones(64, 48, dtype=torch.bfloat16)
    b = torch.ones(48, 32, dtype=torch.bfloat16)
    inside = scratchpad(aten.mm.default, (a, b))
    assert [2 * 64 * 32, *(buffer.num_bytes for buffer in inside.after[:1] if buffer.num_bytes)] == bytes_seen(a, b)
    assert scratchpad(aten.mm.default, (a.float(), b.float())) is NOTHING


def test_an_extrapolated_prediction_has_the_scratchpads_of_its_own_shapes() -> None:
    settings = {"precision": "bf16", "max_grad_norm": None, "optimizer_in_backward": True, "sequence_length": 16}
    for size in (2, 4, 8):
        predict(tiny(**settings, micro_batch_size=size), CPU)
    large = tiny(**settings, micro_batch_size=12)
    recorded = record(large, CPU, large.read_corpus(), 12)
    assert predict(large, CPU).peak_allocated_bytes == recorded.allocated_bytes_E.max()


def test_a_product_that_allocates_nothing_has_no_scratchpad(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_products._measured_bytes.cache_clear()
    monkeypatch.setattr(cpu_products, "_allocations", lambda: nullcontext([]))
    assert cpu_products.scratchpad_bytes("inside mm", (3, 5, 5, 1, 5, 7, 7, 1)) == 0
    cpu_products._measured_bytes.cache_clear()
