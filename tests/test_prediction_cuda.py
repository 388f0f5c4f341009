"""Predictions for CUDA cards: two independent simulations agree, and the rules are those of torch."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, tiny
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.base.errors import InvalidInputError
from pipeline.base.torch_version import TORCH_VERSION
from pipeline.config.experiment import make_experiment
from pipeline.jobs.plan_settings import planned_row
from pipeline.memory.timeline import Timeline
from pipeline.prediction import autocast
from pipeline.prediction.cards import CARDS, find_card
from pipeline.prediction.cuda_operators import cuda_operators
from pipeline.prediction.predict import Prediction, predict
from pipeline.prediction.product_workspaces import ProductWorkspaces
from pipeline.prediction.rates import cost_prior
from pipeline.prediction.trace import trace
from pipeline.simulation.cards import ASSUMED_CONTEXT
from pipeline.techniques.precision import Precision

A100, H200, T4 = find_card("a100"), find_card("h200"), find_card("t4")
MIB = 2**20
WIDE: dict[str, Any] = {
    "causal_lm__width": 64,
    "causal_lm__num_heads": 4,
    "sequence_length": 64,
    "vocabulary_size": 2048,
}
ROUTES: list[dict[str, Any]] = [
    {"micro_batch_size": 8},
    {"micro_batch_size": 8, "precision": "bf16"},
    {"micro_batch_size": 8, "precision": "bf16", "checkpointing": "every_layer", "causal_lm__num_layers": 4},
    {"micro_batch_size": 2, "precision": "bf16", "accumulation_steps": 3},
    {"micro_batch_size": 8, "precision": "bf16", "causal_lm__dropout": 0.1},
    {"micro_batch_size": 8, "precision": "bf16", "model": "qwen3-nano", "causal_lm__num_layers": 4},
]


def visible_bytes(timeline: Timeline) -> int:
    """Return the peak without workspaces: what the dispatcher sees."""
    alive = peak = 0
    lifetimes = timeline.lifetimes
    for event in timeline.events_E:
        lifetime = lifetimes[event if event >= 0 else -1 - event]
        if not lifetime.operator.startswith("inside "):
            alive += lifetime.num_bytes if event >= 0 else -lifetime.num_bytes
            peak = max(peak, alive)
    return peak


@pytest.mark.slow
def test_two_simulations_of_a_gpu_agree() -> None:
    cases = [{**WIDE, **case} for case in ROUTES]
    words = [sys.executable, str(ROOT / "tests" / "private_device.py"), json.dumps(cases)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for case, other in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        experiment = tiny(**case)
        assert visible_bytes(trace(experiment, A100, experiment.read_corpus())) == pytest.approx(other, rel=0.005), case


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_autocast_lists_are_complete_for_this_torch() -> None:
    ours = {
        name
        for names in (
            autocast.FLOAT32,
            autocast.FLOAT32_RESULT,
            autocast.FLOAT32_NORM,
            autocast.LOWER_PRECISION,
            autocast.WIDEST,
        )
        for name in names.split()
    }
    assert ours >= autocast.registered("AutocastCUDA") - autocast.registered("AutocastCPU")


def results_under_autocast() -> Iterator[tuple[str, torch.dtype]]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        workspaces = F.linear(torch.ones(4, 8), torch.ones(8, 8))
        yield "linear", workspaces.dtype
        yield "layer_norm", F.layer_norm(workspaces, (8,)).dtype
        yield "pow", workspaces.pow(2).dtype
        yield "softmax", workspaces.softmax(-1).dtype
        yield "sum", workspaces.sum().dtype
        yield "norm", workspaces.norm().dtype
        yield "cumsum", workspaces.cumsum(0, dtype=torch.bfloat16).dtype
        yield "gelu", F.gelu(workspaces).dtype
        yield "cat", torch.cat([workspaces, workspaces]).dtype
        yield "addcmul", torch.addcmul(workspaces, workspaces, torch.ones(4, 8)).dtype


def test_dtypes_under_simulated_autocast_are_cudas() -> None:
    half, single = torch.bfloat16, torch.float32
    with cuda_operators((8, 0)):
        seen = dict(results_under_autocast())
    assert seen == {
        "linear": half,
        "layer_norm": single,
        "pow": single,
        "softmax": single,
        "sum": single,
        "norm": single,
        "cumsum": half,  # an explicit dtype is kept
        "gelu": half,
        "cat": half,
        "addcmul": single,
    }


def kernels() -> list[str]:
    """Return the backward kernels of attention, dropout and layer norm."""
    heads = torch.ones(2, 4, 16, 8, requires_grad=True)
    attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return [str(result.grad_fn).split()[0] for result in (attended, F.dropout(heads, 0.5), F.layer_norm(heads, (8,)))]


def test_operators_are_restored_after_an_error() -> None:
    before, dtypes = kernels(), dict(results_under_autocast())
    with pytest.raises(ZeroDivisionError), cuda_operators((8, 0)), FakeTensorMode():
        during = kernels()
        raise ZeroDivisionError
    assert during[:2] == ["<ScaledDotProductEfficientAttentionBackward0", "<NativeDropoutBackward0"] != before[:2]
    assert kernels() == before and dict(results_under_autocast()) == dtypes


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("channels", [20, 64])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_every_kernel_runs_forward_and_backward(capability: tuple[int, int], channels: int, masked: bool) -> None:
    with cuda_operators(capability), FakeTensorMode():
        heads = torch.empty(2, 4, 16, channels, dtype=torch.float16, requires_grad=True)
        mask: Tensor | None = torch.empty(2, 1, 16, 16, dtype=torch.bool) if masked else None
        result = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, is_causal=not masked)
        result.sum().backward()
    assert result.shape == heads.shape and heads.grad is not None and heads.grad.dtype == torch.float16


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predict(tiny(micro_batch_size=8, precision="bf16", **WIDE), A100)


def test_device_bytes_exceed_reserved_bytes_which_exceed_allocated_bytes(prediction: Prediction) -> None:
    reserved = prediction.peak_reserved_bytes
    assert reserved is not None and reserved >= prediction.peak_allocated_bytes > prediction.breakdown.peak_bytes
    assert reserved % (2 * MIB) == 0
    assert prediction.peak_device_bytes == reserved + ASSUMED_CONTEXT.mib * MIB


def test_the_workspaces_of_both_threads_are_counted_once() -> None:
    experiment = tiny(micro_batch_size=8, precision="bf16", **WIDE)
    lifetimes = trace(experiment, A100, experiment.read_corpus()).lifetimes
    inside = [lifetime for lifetime in lifetimes if lifetime.operator.startswith("inside ")]
    sizes = [lifetime.num_bytes for lifetime in inside if lifetime.freed_at is None]
    assert sizes.count(8320 * 1024) == (2 if TORCH_VERSION < (2, 15) else 0)
    backward = [lifetime for lifetime in inside if "flash" in lifetime.operator and lifetime.num_bytes]
    # softmax_d and dq_accum of 8 sequences of 64 tokens (rounded to 128), 4 heads of 16 channels (rounded to 32).
    assert [lifetime.num_bytes for lifetime in backward] == [
        8 * 4 * 128 * 4,
        8 * 4 * 128 * 32 * 4,
    ] * 4  # 2 layers, 2 optimizer steps


@pytest.mark.parametrize(
    ("version", "axes", "dtype", "expected"),
    [
        ((2, 11), 1, torch.bfloat16, [[32, 1], [], []]),
        ((2, 12), 1, torch.bfloat16, [[32], [], []]),
        ((2, 15), 1, torch.float32, [[1, 1], [1, 1], [32, 32]]),
        ((2, 15), 2, torch.bfloat16, [[1, 1], [1, 1], [32, 32]]),
        ((2, 15), 2, torch.float32, [[32, 32], [32, 32], [32, 32]]),
    ],
)
def test_workspaces_of_products_follow_the_version(
    version: tuple[int, int], axes: int, dtype: torch.dtype, expected: list[list[int]]
) -> None:
    """Two products with a bias of so many axes and one without: cuBLAS has 32 MiB, cublasLt 1; twice is freed."""
    workspaces = ProductWorkspaces((9, 0), version, {})
    matrices = (torch.empty(16, 16, dtype=dtype, device="meta"),) * 2
    bias = torch.empty([16] * axes, dtype=dtype, device="meta")
    addmm, mm = torch.ops.aten.addmm.default, torch.ops.aten.mm.default
    calls = [(addmm, (bias, *matrices)), (addmm, (bias, *matrices)), (mm, matrices)]
    assert [[buffer.num_bytes // MIB for buffer in workspaces(*call).after] for call in calls] == expected


def test_a_budget_between_allocated_and_reserved_bytes_is_replayed(prediction: Prediction) -> None:
    reserved, allocated = prediction.peak_reserved_bytes, prediction.peak_allocated_bytes
    assert reserved is not None
    assert prediction.fits(reserved)
    assert not prediction.fits(allocated - 1)
    assert prediction.fits(reserved - 2 * MIB) >= prediction.fits(allocated)


def test_the_peak_under_a_budget_is_that_at_which_cached_memory_is_released(prediction: Prediction) -> None:
    reserved, allocated = prediction.peak_reserved_bytes, prediction.peak_allocated_bytes
    assert reserved is not None
    assert prediction.peak_within(reserved) == prediction.peak_within(2 * reserved) == reserved
    assert prediction.peak_within(allocated - 1) is None
    peaks = {budget: prediction.peak_within(budget) for budget in range(allocated, reserved, MIB)}
    fitting = {budget: peak for budget, peak in peaks.items() if peak is not None}
    assert fitting and all(allocated <= peak <= budget for budget, peak in fitting.items())
    for budget in peaks:
        assert prediction.fits(budget) == (budget in fitting), budget
        row = planned_row({}, tiny(micro_batch_size=8, precision="bf16", **WIDE), prediction, budget, cost_prior(A100))
        assert row.fits == (row.peak_bytes <= budget)
        assert row.peak_reserved_bytes is not None and row.peak_device_bytes is not None
        assert row.peak_device_bytes - row.peak_reserved_bytes == ASSUMED_CONTEXT.mib * MIB


def test_expandable_segments_follow_the_environment_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = tiny(micro_batch_size=8, precision="bf16", **WIDE)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert not predict(experiment, A100).expandable_segments
    explicit = predict(experiment, A100, expandable_segments=True)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert predict(experiment, A100) == explicit
    monkeypatch.setattr(Precision, "environment", lambda self: {"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    assert not predict(experiment, A100).expandable_segments
    assert predict(experiment, A100, expandable_segments=True) == explicit


def test_the_memory_of_gpt2_is_that_of_an_earlier_simulation() -> None:
    """Simulated MiB allocated at micro-batch 8 x 1024 in bf16, with dropout."""
    expected = {("gpt2", "none"): 12_703, ("gpt2", "every_layer"): 6_614, ("gpt2-medium", "every_layer"): 9_759}
    for (model, checkpointing), mib in expected.items():
        settings = {"device": "cpu", "model": model, "sequence_length": 1024, "precision": "bf16"}
        experiment = make_experiment({**settings, "checkpointing": checkpointing}, "main")
        prediction = predict(experiment, H200)
        assert prediction.peak_allocated_bytes / MIB == pytest.approx(mib, rel=0.01)
        shares = prediction.breakdown.category_bytes
        assert shares["optimizer state"] == pytest.approx(2 * shares["parameters"], rel=0.001)
        assert prediction.breakdown.largest[0].shape[-1] == 50257 and prediction.breakdown.phase == "backward"


def test_precisions_that_a_card_lacks_are_refused() -> None:
    for precision in ("bf16", "tf32"):
        with pytest.raises(InvalidInputError, match=f"{precision} needs compute capability 8.0.*Tesla T4 is older"):
            predict(tiny(precision=precision), T4)
    assert predict(tiny(precision="fp16"), T4).peak_allocated_bytes > 0


def test_the_error_for_an_unknown_card_lists_the_cards() -> None:
    with pytest.raises(InvalidInputError, match=f"no card is called 'h300'; the cards are {', '.join(CARDS)}"):
        find_card("h300")


@pytest.mark.slow
def test_predicting_the_largest_models_takes_little_memory() -> None:
    code = """
import resource
from pipeline.config.experiment import make_experiment
from pipeline.prediction.cards import find_card
from pipeline.prediction.predict import predict
for model in ("gpt2-xl", "llama-7b"):
    values = {"device": "cpu", "model": model, "sequence_length": 1024, "micro_batch_size": 4, "precision": "bf16"}
    print(predict(make_experiment(values, "main"), find_card("h200")).breakdown.category_bytes["parameters"] // 4)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    xl, seven_billion, used_kib = map(int, done.stdout.split())
    assert xl == pytest.approx(1.56e9, rel=0.01) and seven_billion == pytest.approx(6.74e9, rel=0.01)
    assert used_kib < 2 * 2**20
