"""The work of a run: FLOPs of products by type, bytes moved by all else, kernels, and bytes copied to the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, tiny
from torch import Tensor

from pipeline.memory.recorder import LifetimeRecorder
from pipeline.memory.work import OTHER_AMOUNTS, Work
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.fake.trace import record
from pipeline.prediction.predict import predict

MATRIX = 4 * 8 * 16
"""Bytes of a float32 matrix of 8 x 16."""


def work_of(function: Callable[..., Any], *args: Tensor) -> Work:
    """Return the recorded work of a call."""
    recorder = LifetimeRecorder(torch.device("cpu"))
    with recorder:
        function(*args)
    recorder.mark(0, "forward")
    return recorder.timeline().work[0].work


@pytest.mark.parametrize(
    ("call", "moved", "kernels"),
    [
        (lambda one, other: one + other, 3 * MATRIX, 1),
        (lambda one, other: one.add_(other), 3 * MATRIX, 1),
        (lambda one, other: one.copy_(other), 2 * MATRIX, 1),
        (lambda one, _: one.zero_(), MATRIX, 1),
        (lambda one, _: one.to(torch.bfloat16), MATRIX + MATRIX // 2, 1),
        (lambda one, other: torch.cat([one, other]), 4 * MATRIX, 1),
        (lambda one, other: torch._foreach_add_([one, other], 1), 4 * MATRIX, 1),
        (lambda one, other: torch._foreach_add_([one], [other]), 3 * MATRIX, 1),
        (lambda one, _: one.t().reshape(16, 2, 4)[1:].transpose(0, 1).detach(), 0, 0),
        (lambda one, _: torch.empty_like(one), 0, 0),
        (lambda one, _: torch.ops.aten._unsafe_view(one, (16, 8)), 0, 0),
        (lambda one, _: F.embedding(torch.tensor([3, 3]), one), 2 * 8 + 2 * 4 * 16, 1),
    ],
)
def test_an_operator_moves_what_it_reads_and_writes_and_a_view_nothing(
    call: Callable[..., Any], moved: int, kernels: int
) -> None:
    work = work_of(call, torch.ones(8, 16), torch.ones(8, 16))
    assert work == Work(moved_bytes=moved, num_kernels=kernels)


@pytest.mark.parametrize(
    ("dtype", "precision", "name"),
    [
        (torch.float32, "highest", "float32"),
        (torch.float32, "high", "tf32"),
        (torch.bfloat16, "high", "bfloat16"),
        (torch.float16, "highest", "float16"),
    ],
)
def test_a_product_counts_by_the_type_in_which_it_is_computed(dtype: torch.dtype, precision: str, name: str) -> None:
    left, right = torch.ones(8, 16, dtype=dtype), torch.ones(16, 4, dtype=dtype)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        work = work_of(torch.mm, left, right)
    finally:
        torch.set_float32_matmul_precision(before)
    assert work == Work(matrix_flops={name: 2 * 8 * 16 * 4}, num_kernels=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_one_kernel_counts_apart_from_other_products(dtype: torch.dtype) -> None:
    query = torch.ones(2, 3, 16, 8, dtype=dtype, requires_grad=True)
    work = work_of(lambda one: F.scaled_dot_product_attention(one, one, one).sum().backward(), query)
    forward = 2 * 2 * 2 * 3 * 16 * 16 * 8  # two products
    assert work.matrix_flops == {f"{str(dtype).removeprefix('torch.')} attention": forward * 7 / 2}


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_the_passes_and_the_update_are_all_of_a_step(passes: int) -> None:
    experiment = tiny(micro_batch_size=2, accumulation_steps=passes, max_grad_norm=1.0, precision="bf16")
    prediction = predict(experiment, CPU)
    whole = record(experiment, experiment.read_corpus(), 2 * passes)
    step = [one for one in whole.work if one.step == 1 and one.phase != "data"]
    assert len(step) == 2 * passes + 1
    expected = sum((one.work for one in step), Work())
    predicted = prediction.pass_work * passes + prediction.update_work
    assert dict(predicted.matrix_flops) == pytest.approx(expected.matrix_flops)
    for name in OTHER_AMOUNTS:
        assert getattr(predicted, name) == pytest.approx(getattr(expected, name)), name


def test_a_batch_is_copied_to_a_card_and_not_on_a_cpu() -> None:
    experiment = tiny(micro_batch_size=4)
    on_card, on_cpu = (predict(experiment, target).pass_work for target in (find_hardware("h100"), CPU))
    assert on_card.host_bytes == 2 * 8 * 4 * 32  # tokens and targets, of 8 bytes
    assert on_cpu.host_bytes == 0


def test_recomputation_adds_products_movement_and_kernels() -> None:
    plain, again = (predict(tiny(checkpointing=policy), CPU) for policy in ("none", "every_layer"))
    assert again.pass_work.flops > plain.pass_work.flops
    assert again.pass_work.moved_bytes > plain.pass_work.moved_bytes
    assert again.pass_work.num_kernels > plain.pass_work.num_kernels
    assert again.update_work == plain.update_work


def test_hooks_of_saved_tensors_and_the_mode_that_keeps_attention_call_python() -> None:
    policies = ("none", "every_2_layers", "every_layer", "attention_saved")
    plain, half, every, kept = (predict(tiny(checkpointing=policy), CPU).pass_work for policy in policies)
    recomputed = every.num_kernels - plain.num_kernels
    assert plain.num_python_calls == 0
    assert every.num_python_calls == 2 * half.num_python_calls == pytest.approx(2 * recomputed, rel=0.1)
    assert kept.num_python_calls == pytest.approx(2 * every.num_python_calls, rel=0.1)
