"""The recorder of storage lifetimes: its peak is the allocator's, and each storage has a category and a module."""

import gc
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from conftest import tiny, with_corpus_of
from torch.nn.functional import scaled_dot_product_attention

from pipeline.base.contracts import Trainable
from pipeline.base.results import MemoryUse
from pipeline.memory.breakdown import NUM_LARGEST_THEN, NUM_MOMENTS, at_peak, course_of, modules_at_peak
from pipeline.memory.meter import make_meter
from pipeline.memory.recorder import LifetimeRecorder
from pipeline.memory.timeline import CATEGORIES, Timeline
from pipeline.prediction.fake.cpu_buffers import cpu_buffers
from pipeline.training.loop import Message, train
from pipeline.training.profiler import record_first_steps
from pipeline.training.step import build_step

CASES: list[dict[str, Any]] = [
    {"micro_batch_size": 4},
    {"micro_batch_size": 2, "accumulation_steps": 3},
    {"micro_batch_size": 4, "precision": "bf16"},
    {"micro_batch_size": 4, "checkpointing": "every_layer"},
    {"micro_batch_size": 4, **with_corpus_of("encoder_stack"), "checkpointing": "every_2_layers"},
    # The gradients of the shared embedding meet at the peak, and are added up in place: but not in float32.
    {"micro_batch_size": 1, "checkpointing": "every_layer", "precision": "bf16", "vocabulary_size": 2048},
    {"micro_batch_size": 1, "checkpointing": "every_layer", "vocabulary_size": 2048},
    {"micro_batch_size": 2, "model": "llama-nano", "causal_lm__num_layers": None, "causal_lm__width": None},
]


@cache
def recorded(**settings: Any) -> tuple[Timeline, MemoryUse]:
    """Return the recorded timeline of two optimizer steps, and the profiler's peak of the same steps."""
    experiment = tiny(**settings)
    prepared = experiment.prepare()
    recorder = LifetimeRecorder(experiment.device)
    record_first_steps(experiment, prepared, recorder)
    timeline = recorder.timeline()
    gc.collect()  # what has been left must not die while the meter counts
    messages: list[Message] = []
    train(experiment, prepared, messages.append)
    return timeline, [message for message in messages if isinstance(message, MemoryUse)][-1]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("settings", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_recorded_peak_is_the_allocators(settings: dict[str, Any]) -> None:
    timeline, memory = recorded(**settings)
    assert memory.peak_allocated_bytes is not None
    assert max(timeline.allocated_bytes_E) == pytest.approx(
        memory.peak_allocated_bytes, rel=0.001, abs=2 * 5056 + 64
    )  # the states of the random number generator that checkpoints keep, and what numbers in Python become


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_attention_takes_blocks_on_a_cpu(is_transposed: bool, dtype: torch.dtype) -> None:
    """Its gradient is copied unless the heads are the inner axis of its memory."""
    shape = (2, 1500, 3, 16) if is_transposed else (2, 3, 1500, 16)
    query, grad = torch.randn(2, *shape, dtype=dtype)
    if is_transposed:
        query, grad = query.transpose(1, 2), grad.transpose(1, 2)
    query.requires_grad_()

    def attend() -> None:
        scaled_dot_product_attention(query, query, query, is_causal=True).backward(grad)  # type: ignore[no-untyped-call]
        query.grad = None

    attend()
    with LifetimeRecorder(torch.device("cpu"), inside_of=cpu_buffers) as recorder:
        attend()
    meter = make_meter(torch.device("cpu"))
    attend()
    meter.stop()
    assert max(recorder.timeline().allocated_bytes_E) == meter.read().peak_allocated_bytes


def test_parameters_gradients_and_optimizer_state_are_exact() -> None:
    experiment = tiny(micro_batch_size=2, accumulation_steps=2)
    parameters = list(build_step(experiment, experiment.prepare()).trainable.module.parameters())
    sizes = sum(parameter.nbytes for parameter in parameters)
    timeline, _ = recorded(micro_batch_size=2, accumulation_steps=2)
    backward = [span for span in timeline.spans if (span.step, span.phase) == (1, "backward")][-1]
    alive = Counter[str]()
    for number in timeline.alive(backward.begin):
        alive[timeline.storages[number].category] += int(timeline.num_bytes_N[number])
    assert alive["parameters"] == alive["gradients"] == sizes
    assert alive["optimizer state"] == 2 * sizes + 4 * len(parameters)  # two moments, and a step count of 4 bytes
    assert set(alive) <= set(CATEGORIES)


@pytest.mark.parametrize("checkpointing", ["none", "every_layer"])
def test_every_storage_has_a_module(checkpointing: str) -> None:
    timeline, _ = recorded(micro_batch_size=4, checkpointing=checkpointing)
    names = {name for name, _ in build_step(tiny(), tiny().prepare()).trainable.module.named_modules()}
    of_steps = [timeline.storages[number] for number in timeline.events_E[timeline.spans[1].begin :] if number >= 0]
    assert {lifetime.module for lifetime in of_steps} <= names | {"loss", "optimizer"}
    [head] = {
        lifetime.module
        for lifetime in of_steps
        if lifetime.shape[-1:] == (512,) and lifetime.operator == "_unsafe_view"
    } or {""}
    assert head in ("lm_head", "")
    backward = [
        lifetime
        for lifetime in of_steps
        if lifetime.operator == "gelu_backward" or lifetime.operator == "tanh_backward"
    ]
    assert {lifetime.module for lifetime in backward} == {f"transformer.h.{layer}.mlp.act" for layer in (0, 1)}


def test_checkpointing_reduces_activations_only() -> None:
    plain, lean = (
        at_peak(recorded(micro_batch_size=8, checkpointing=policy, vocabulary_size=300)[0])
        for policy in ("none", "every_layer")
    )
    assert lean.category_bytes["activations"] < plain.category_bytes["activations"]
    assert lean.category_bytes["optimizer state"] == plain.category_bytes["optimizer state"]


def test_the_breakdown_of_the_peak_adds_up() -> None:
    timeline, _ = recorded(micro_batch_size=4, precision="bf16")
    breakdown = at_peak(timeline)
    assert breakdown.peak_bytes == max(timeline.allocated_bytes_E)
    assert sum(breakdown.category_bytes.values()) == sum(breakdown.module_bytes.values()) == breakdown.peak_bytes
    assert breakdown.step == 1 and breakdown.phase in ("forward", "backward", "optimizer")
    sizes = [tensor.num_bytes for tensor in breakdown.largest]
    assert sizes == sorted(sizes, reverse=True)
    course = course_of(timeline, 1)
    totals = [sum(parts) for parts in zip(*course.category_bytes.values(), strict=True)]
    assert max(totals) == breakdown.peak_bytes
    assert [phase for phase, _ in course.phases] == ["forward", "backward", "optimizer"]
    assert len(course.seconds) == len(totals) and list(course.seconds) == sorted(course.seconds)
    assert len(course.moments) <= NUM_MOMENTS and max(totals) in [totals[moment.event] for moment in course.moments]
    for moment in course.moments:
        largest = [course.tensors[place].num_bytes for place in moment.largest]
        assert largest == sorted(largest, reverse=True) and len(largest) <= NUM_LARGEST_THEN
        assert sum(largest) <= totals[moment.event]


def test_modules_and_categories_add_up_to_the_peak() -> None:
    timeline, _ = recorded(micro_batch_size=4)
    breakdown, modules = at_peak(timeline), modules_at_peak(timeline)
    by_module, by_category = Counter[str](), Counter[str]()
    for one in modules:
        by_module[one.module] += one.num_bytes
        by_category[one.category] += one.num_bytes
    assert by_module == breakdown.module_bytes and by_category == breakdown.category_bytes


def test_recording_leaves_no_hooks_behind() -> None:
    recorder = LifetimeRecorder(torch.device("cpu"))
    module = torch.nn.Linear(4, 4)
    trainable = Trainable(module=module, layers=(), loss=lambda *_: torch.zeros(()))
    with recorder, recorder.watching(trainable, torch.optim.AdamW(module.parameters())):
        module(torch.ones(2, 4)).sum().backward()
    events = len(recorder.timeline().events_E)
    module(torch.ones(2, 4)).sum().backward()
    assert len([event for event in recorder.timeline().events_E[events:] if event >= 0]) == 0
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks
