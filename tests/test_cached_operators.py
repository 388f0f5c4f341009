"""The cache of operators on fake tensors: its results are those of the operators, in the same storages."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny, with_corpus_of
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from pipeline.memory.recorder import LifetimeRecorder, passed_on
from pipeline.memory.timeline import Timeline
from pipeline.prediction.fake.cached_operators import CachedFakeTensorMode, clear_cache
from pipeline.prediction.fake.trace import record

RUNS: list[dict[str, Any]] = [
    {"precision": "fp32"},
    {"precision": "bf16", "checkpointing": "every_layer", "accumulation_steps": 2},
    {"precision": "fp16", "causal_lm__dropout": 0.1, "max_grad_norm": 1.0},
    {"model": "llama-nano", "precision": "bf16"},
    {"sequences": "padded", "accumulation_steps": 2},
    {"encoder_stack__width": 64, "sequence_length": 64, **with_corpus_of("encoder_stack")},
]


class UncachedFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """torch's own fake tensors, with the interface of CachedFakeTensorMode."""

    run = staticmethod(passed_on)

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


def memory_of(timeline: Timeline) -> tuple[object, ...]:
    """Return storages and work, and before which allocation each is freed: autocast frees weights in any order."""
    freed_before_N = np.searchsorted(timeline.allocated_at_N, timeline.freed_at_N).tolist()
    made = [(one.num_bytes, one.shape, one.dtype, one.operator, one.module, one.category) for one in timeline.storages]
    return freed_before_N, made, timeline.work


@pytest.mark.matrix(2)
@pytest.mark.parametrize("settings", RUNS)
def test_a_timeline_is_the_same_with_and_without_the_cache(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tiny(micro_batch_size=2, **settings)
    run = partial(record, experiment, experiment.read_corpus(), experiment.effective_batch_size)
    clear_cache()
    first, again = run(), run()
    monkeypatch.setattr("pipeline.prediction.fake.recording.CachedFakeTensorMode", UncachedFakeTensorMode)
    plain = run()
    assert memory_of(first) == memory_of(again) == memory_of(plain)


def tensor(*shape: int, **options: Any) -> Tensor:
    return torch.empty(shape, device="cpu", **options)


CALLS: list[Callable[[Tensor], Any]] = [
    lambda x: x.add_(1),
    lambda x: x.mul(2.0),
    lambda x: x.transpose(0, 1).contiguous(),
    lambda x: x.t()[1:].unsqueeze(0),
    lambda x: x.expand(3, *x.shape),
    lambda x: x.split(1),
    lambda x: x.unbind(),
    lambda x: torch.ops.aten._unsafe_view(x, [x.numel()]),
    lambda x: x.detach(),
    lambda x: torch.empty_like(x, memory_format=torch.preserve_format),
    lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
    lambda x: torch.native_dropout(x, 0.5, True),
    lambda x: torch.cat([x, x]),
    lambda x: torch._foreach_add([x, x], 1),
    lambda x: torch._foreach_mul_([x, x], 2),
    lambda x: x.sum(),
    lambda x: x.to(torch.bfloat16),
    lambda x: x.real.as_strided((2,), (1,), 1),
    lambda x: x.size(0),
    lambda x: torch.tensor(1.5) * x,
    lambda x: torch.cat([x, x], out=torch.empty(0)),
    lambda x: torch.mul(x, 2, out=torch.empty(2, 3)),
    lambda x: torch.max(x, 1, out=(torch.empty(0), torch.empty(0, dtype=torch.int64))),
]


def forms(made: Any, argument: Tensor) -> list[object]:
    """Return the form of each tensor of a result; storages are numbered as they appear."""
    storages = {argument.untyped_storage()._cdata: 0}

    def form_of(part: Tensor) -> tuple[object, ...]:
        storage = part.untyped_storage()
        number = storages.setdefault(storage._cdata, len(storages))
        form = part.shape, part.stride(), part.dtype, part.device, part.storage_offset(), part.requires_grad
        return *form, part is argument, number, storage.nbytes()

    return [form_of(part) if isinstance(part, Tensor) else part for part in tree_leaves(made)]


@pytest.mark.parametrize("call", CALLS, ids=[str(number) for number in range(len(CALLS))])
def test_a_cached_result_equals_that_of_the_operator(call: Callable[[Tensor], Any]) -> None:
    clear_cache()
    seen = []
    for mode in (UncachedFakeTensorMode(), CachedFakeTensorMode(), CachedFakeTensorMode()):
        with mode:
            argument = tensor(2, 3)
            seen.append(forms(call(argument), argument))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("call", CALLS, ids=[str(number) for number in range(len(CALLS))])
def test_a_recorder_sees_the_same_lifetimes(call: Callable[[Tensor], Any]) -> None:
    clear_cache()
    seen = []
    for mode in (UncachedFakeTensorMode(), CachedFakeTensorMode(), CachedFakeTensorMode()):
        with mode, LifetimeRecorder(torch.device("cpu"), run=mode.run) as recorder:
            argument = tensor(2, 3)
            for _ in range(3):
                call(argument)
            timeline = recorder.timeline()
            seen.append((timeline.storages, timeline.events_E.tolist()))
    assert seen[0] == seen[1] == seen[2]


def test_equal_numbers_of_different_types_are_cached_apart() -> None:
    with CachedFakeTensorMode():
        numbers = tensor(2, dtype=torch.int64)
        assert [(numbers + one).dtype for one in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
        assert [(tensor(2, dtype=torch.bool) + one).dtype for one in (True, 1, 1.0)] == [
            torch.bool, torch.int64, torch.float32,
        ]  # fmt: skip


def test_the_default_dtype_is_part_of_the_key() -> None:
    with CachedFakeTensorMode():
        before = torch.zeros(2).dtype
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.zeros(2).dtype is torch.float64
        finally:
            torch.set_default_dtype(before)
        assert torch.zeros(2).dtype is before


def test_a_tensor_that_changed_its_shape_in_place_is_looked_up_by_its_new_shape() -> None:
    with CachedFakeTensorMode():
        for _ in range(2):
            matrix = tensor(2, 3)
            assert (matrix + 1).shape == (2, 3)
            matrix.t_()
            assert (matrix + 1).shape == (3, 2)
            matrix.resize_(6)
            assert (matrix + 1).shape == (6,)


def test_an_operator_that_depends_on_values_is_refused_every_time() -> None:
    with CachedFakeTensorMode():
        for _ in range(2):
            with pytest.raises(DynamicOutputShapeException):
                tensor(3).nonzero()


def test_gradients_flow_through_cached_results() -> None:
    for _ in range(2):
        with CachedFakeTensorMode():
            weight = torch.nn.Parameter(tensor(3, 3))
            (tensor(2, 3) @ weight).view(-1).sum().backward()  # type: ignore[no-untyped-call]
            assert weight.grad is not None and weight.grad.shape == (3, 3)
