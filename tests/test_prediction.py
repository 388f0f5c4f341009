"""Predicted memory against the allocator's peaks in real runs, and the process unchanged after a prediction."""

import gc
import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CPU, ROOT, TINY, tiny, with_corpus_of
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoConfig, masking_utils

import fitproof
from pipeline.base.contracts import Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.results import MemoryUse, StepRecord
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.given import merged, validate
from pipeline.config.settings import AllSettings
from pipeline.memory.work_counter import WorkCounter
from pipeline.models import causal_lm
from pipeline.prediction import patches
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.fake.recording import simulated
from pipeline.prediction.fake.trace import LARGEST_GROWTH_BYTES, record, trace
from pipeline.prediction.fake_batches import RepeatedRow
from pipeline.prediction.patches import SUPPORTED, notes_on
from pipeline.prediction.predict import predict, predict_each
from pipeline.training.loop import Loop, Message, train
from pipeline.training.step import build_step, make_optimizer

WIDE: Mapping[str, Any] = {"causal_lm__width": 64, "causal_lm__num_heads": 4, "sequence_length": 64}
DEEP: Mapping[str, Any] = {**WIDE, "causal_lm__num_layers": 4, "vocabulary_size": 2048}
CASES: list[dict[str, Any]] = [
    {"micro_batch_size": 1},
    {"micro_batch_size": 8},
    {"micro_batch_size": 8, "causal_lm__num_layers": 5, **WIDE},
    {"micro_batch_size": 4, "precision": "bf16", **WIDE},
    {"micro_batch_size": 4, "precision": "fp16", **WIDE},
    {"micro_batch_size": 8, "checkpointing": "every_layer", **WIDE},
    {"micro_batch_size": 8, "checkpointing": "every_2_layers", "causal_lm__num_layers": 4, **WIDE},
    {"micro_batch_size": 8, "accumulation_steps": 3, "precision": "bf16", "checkpointing": "every_layer", **DEEP},
    {"micro_batch_size": 1, "accumulation_steps": 2, "precision": "bf16", "checkpointing": "every_layer", **DEEP},
    {"micro_batch_size": 4, "sequences": "padded", "accumulation_steps": 2, **WIDE},
    {"micro_batch_size": 4, "causal_lm__dropout": 0.1, "checkpointing": "every_layer", **WIDE},
    {"micro_batch_size": 4, "model": "llama-nano", **WIDE},
    {"micro_batch_size": 4, "model": "qwen3-nano", "precision": "bf16", **WIDE},
    {"micro_batch_size": 4, "encoder_stack__width": 64, "sequence_length": 64, **with_corpus_of("encoder_stack")},
]


def forget_tables() -> None:
    """Let bitsandbytes forget the tensors that it keeps for a process, so that it allocates them as in a new one."""
    modules = sys.modules
    if "bitsandbytes" in modules:
        modules["bitsandbytes.functional"].name2qmap.clear()
        modules["bitsandbytes.backends.utils"]._code_4bit_cache.clear()
        modules["bitsandbytes.backends.default.ops"]._get_4bit_quantize_bounds.cache_clear()


def measured(experiment: Experiment, prepared: Prepared | None = None) -> int:
    """Return the allocator's peak over a real training."""
    messages: list[Message] = []
    gc.collect()  # what an earlier test left must not be freed while the meter counts
    forget_tables()
    train(experiment, prepared or experiment.prepare(), messages.append)
    peak = [message for message in messages if isinstance(message, MemoryUse)][-1].peak_allocated_bytes
    assert peak is not None
    return peak


@pytest.mark.quick
@pytest.mark.matrix(4)
@pytest.mark.parametrize("settings", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_prediction_equals_the_peak_of_the_allocator(settings: dict[str, Any]) -> None:
    experiment = tiny(**settings, eval_steps=0)
    prediction = predict(experiment, CPU)
    assert prediction.peak_allocated_bytes == pytest.approx(measured(experiment), rel=0.015)


@pytest.mark.slow
def test_what_products_in_bfloat16_copy_counts_in_a_small_model() -> None:
    levers = {"checkpointing": "every_layer", "loss_kernel": "chunked", "gelu": "fused", "attention": "eager"}
    shape = {"causal_lm__width": 128, "causal_lm__num_layers": 4, "sequence_length": 64, "vocabulary_size": 4096}
    experiment = tiny(micro_batch_size=16, precision="bf16", eval_steps=0, **levers, **shape)
    assert predict(experiment, CPU).peak_allocated_bytes == pytest.approx(measured(experiment), rel=0.001)


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 96, "num_experts": 6},
    "qwen3_moe": {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 3, "head_dim": 16},
}


def mixture_of_experts(kind: str, folder: Path, implementation: str = "grouped_mm", **changes: Any) -> Experiment:
    """Return an experiment on a tiny mixture of experts, whose configuration is written to a folder."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **EXPERTS[kind],
    )
    written = {**config.to_dict(), "experts_implementation": implementation}
    (folder / "config.json").write_text(json.dumps(written))
    shape = dict.fromkeys(("num_layers", "width", "num_heads"))
    batch = {"micro_batch_size": 8, "accumulation_steps": 1, "effective_batch_size": 8, "eval_steps": 0}
    settings = merged(TINY, {"model": str(folder), "causal_lm": shape, **batch, **changes})
    return Experiment(validate(AllSettings, settings, ""))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16", "checkpointing": "every_layer"}], ids=str)
@pytest.mark.parametrize("kind", EXPERTS)
def test_a_mixture_of_experts_is_predicted_within_the_same_error(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    experiment, prepared = mixture_of_experts(kind, tmp_path, **settings), tiny().read_corpus()
    prediction = predict(experiment, CPU, prepared)
    assert prediction.peak_allocated_bytes == pytest.approx(measured(experiment, prepared), rel=0.002)
    on_card = predict(experiment, find_hardware("h100"), prepared)
    assert on_card.peak_allocated_bytes > prediction.peak_allocated_bytes  # its workspaces
    assert on_card.pass_work.flops == pytest.approx(prediction.pass_work.flops, rel=0.02)


def test_experts_add_the_operations_of_those_chosen(tmp_path: Path) -> None:
    prepared = tiny().read_corpus()
    grouped, batched = (
        predict(mixture_of_experts("mixtral", tmp_path, name), CPU, prepared) for name in ("grouped_mm", "batched_mm")
    )
    assert grouped.pass_work.flops == batched.pass_work.flops


def test_eager_routing_of_experts_is_refused_with_a_remedy(tmp_path: Path) -> None:
    experiment, prepared = mixture_of_experts("mixtral", tmp_path, "eager"), tiny().read_corpus()
    with pytest.raises(InvalidInputError, match="modeling_mixtral.py.*set experts_implementation to grouped_mm"):
        predict(experiment, CPU, prepared)


@pytest.mark.parametrize("columns", [6, 8])
def test_grouped_products_have_the_form_of_real_ones(columns: int) -> None:
    def strides() -> list[tuple[int, ...]]:
        left, right = torch.empty(8, 16, requires_grad=True), torch.empty(3, columns, 16, requires_grad=True)
        offsets = torch.tensor([2, 5, 8], dtype=torch.int32)
        product = torch._grouped_mm(left, right.transpose(1, 2), offs=offsets)
        product.backward(torch.empty_strided(product.shape, product.stride()))  # type: ignore[no-untyped-call]
        assert left.grad is not None and right.grad is not None
        return [product.stride(), left.grad.stride(), right.grad.stride()]

    real = strides()
    with simulated():
        assert strides() == real


def test_a_prediction_has_a_breakdown_of_the_peak() -> None:
    prediction = predict(tiny(micro_batch_size=8), CPU)
    breakdown = prediction.breakdown
    assert sum(breakdown.category_bytes.values()) == breakdown.peak_bytes == prediction.peak_allocated_bytes
    assert breakdown.largest[0].num_bytes == 8 * 32 * 512 * 4 and breakdown.largest[0].shape[-1] == 512  # logits
    assert prediction.peak_reserved_bytes is None  # a CPU reserves nothing


def test_a_prediction_needs_no_corpus_of_full_length() -> None:
    with pytest.raises(InvalidInputError):
        tiny(micro_batch_size=10**5).prepare()
    assert predict(tiny(micro_batch_size=10**5), CPU).peak_allocated_bytes > 2**34


def test_the_function_that_reads_a_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def value_reading_loss(module: Any, batch: Any, num_targets: int) -> torch.Tensor:
        return module(batch["input_ids"]).logits[batch["labels"] > 0].sum()  # type: ignore[no-any-return]

    monkeypatch.setattr(causal_lm, "_token_loss", value_reading_loss)
    before = torch.get_rng_state, torch.manual_seed, masking_utils.find_packed_sequence_indices
    with pytest.raises(InvalidInputError, match="value_reading_loss.*reads a value, and a prediction"):
        predict(tiny(vocabulary_size=301), CPU)  # not in the cache of another test
    assert before == (torch.get_rng_state, torch.manual_seed, masking_utils.find_packed_sequence_indices)
    assert type(torch.ones(1)) is torch.Tensor


def test_an_unsupported_precision_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="tf32 needs a CUDA GPU"):
        predict(tiny(precision="tf32"), CPU)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_predicting_during_a_training_does_not_change_its_losses(dropout: float) -> None:
    experiment = tiny(checkpointing="every_layer", causal_lm__dropout=dropout)

    def losses(predict_meanwhile: bool) -> list[float]:
        found: list[float] = []

        def receive(message: Message) -> None:
            if isinstance(message, StepRecord):
                found.append(message.loss)
                if predict_meanwhile:
                    predict(experiment, CPU)

        train(experiment, experiment.prepare(), receive)
        return found

    assert losses(predict_meanwhile=True) == losses(predict_meanwhile=False)


@pytest.mark.parametrize("checkpointing", ["none", "every_layer"])
def test_predictions_agree_with_torchs_mem_tracker(checkpointing: str) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker  # which imports torch's compiler

    experiment = tiny(micro_batch_size=8, checkpointing=checkpointing, **WIDE)
    prepared = experiment.read_corpus()
    tracker, rows = MemTracker(), RepeatedRow(prepared.train)
    with simulated():
        step = build_step(experiment, prepared)
        optimizer = make_optimizer(step.trainable.module, experiment.settings)
        tracker.track_external(step.trainable.module, optimizer)
        with tracker:
            loop = Loop(experiment, rows, step, optimizer, lambda record: None)
            for _ in range(2):
                loop.launch()
                tracker.reset_mod_stats()
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert predict(experiment, CPU, prepared).peak_allocated_bytes == pytest.approx(theirs, rel=0.01)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("settings", [{}, {"precision": "fp16"}, {"checkpointing": "every_layer"}])
def test_many_micro_batches_are_predicted_from_two(settings: dict[str, Any]) -> None:
    experiment = tiny(micro_batch_size=2, accumulation_steps=7, sequences="padded", **settings)
    prepared = experiment.read_corpus()
    short, whole = trace(experiment, prepared), record(experiment, prepared, 14)
    assert len(short.events_E) < len(whole.events_E)
    difference = max(whole.allocated_bytes_E) - max(short.allocated_bytes_E)
    assert 0 <= difference <= 4 * LARGEST_GROWTH_BYTES  # the losses of the four that were not recorded


def test_a_step_whose_memory_keeps_growing_is_recorded_in_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    loss = causal_lm._token_loss

    def growing_loss(module: Any, batch: Any, num_targets: int) -> torch.Tensor:
        kept.append(torch.empty(2**20))
        return loss(module, batch, num_targets)

    monkeypatch.setattr(causal_lm, "_token_loss", growing_loss)
    experiment = tiny(micro_batch_size=2, accumulation_steps=6, vocabulary_size=302)
    assert predict(experiment, CPU).peak_allocated_bytes > 12 * 2**22


def test_pretrained_weights_are_not_needed(tmp_path: Path) -> None:
    built = build_step(tiny(), tiny().read_corpus()).trainable.module
    built.config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    settings = merged(TINY, {"model": str(tmp_path), "causal_lm": dict.fromkeys(("num_layers", "width", "num_heads"))})
    settings["causal_lm"]["pretrained"] = True
    prediction = predict(make_experiment(settings, "main"), CPU, tiny().read_corpus())
    assert prediction.breakdown.peak_bytes == predict(tiny(), CPU).breakdown.peak_bytes


def test_a_prediction_is_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))
    experiment = tiny(micro_batch_size=4)
    first = predict(experiment, CPU)
    monkeypatch.setattr("pipeline.prediction.fake.recording.record_first_steps", None)  # must not be called
    again = predict(tiny(micro_batch_size=4, seed=1, num_steps=9, output="elsewhere"), CPU)
    assert again == first
    for changed in ({"micro_batch_size": 2}, {"precision": "bf16"}, {"sequences": "padded"}, {"sequence_length": 16}):
        with pytest.raises(InvalidInputError, match="not callable"):
            predict(tiny(**{"micro_batch_size": 4, **changed}), CPU)


@pytest.mark.parametrize(
    ("owner", "name"),
    [("torch.amp.GradScaler", "_maybe_opt_step"), ("torch.optim._adafactor", "_single_tensor_adafactor")],
)
def test_a_torch_without_a_function_that_must_be_replaced_is_refused(
    owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(f"{owner}.{name}")
    words = (
        rf"memory is predicted with torch 2.9 to 2.15, and torch .* has no .*\.{name}, .*; install a version of torch"
    )
    with pytest.raises(InvalidInputError, match=words), simulated():
        pass


def test_the_versions_of_torch_in_that_message_are_those_that_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [required] = [each for each in project["dependencies"] if each.startswith("torch>")]
    first, last = SUPPORTED.split(" to ")
    assert required == f"torch>={first},<2.{int(last.partition('.')[2]) + 1}"


def test_a_transformers_without_a_function_that_is_replaced_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notes_on([tiny()], find_hardware("t4")) == ()
    monkeypatch.setattr(patches, "DOCUMENTS", "no_such_function")
    [note] = notes_on([tiny(), tiny()], find_hardware("t4"))
    assert "has no masking_utils.no_such_function" in note
    with simulated():
        pass


def test_parameters_that_qlora_does_not_quantize_are_counted(tmp_path: Path) -> None:
    """Those of fused experts are in no linear layer; transformers and peft leave them as well."""
    experiment = mixture_of_experts("mixtral", tmp_path, adapter="qlora", precision="bf16")
    num_experts = 2 * 4 * (2 * 96 * 64 + 64 * 96 + 64)  # two layers of four: gate, up, down, row of router
    [note] = notes_on([experiment, experiment], CPU)
    assert f" {num_experts:,} of the " in note and "mlp.experts.gate_up_proj, mlp.experts.down_proj" in note
    assert "become float32, as in peft's" in note
    plan = {"model": str(tmp_path), "adapter": "qlora", "gpu": "t4", "effective_batch_size": 1, "sequence_length": 16}
    shape = {**dict.fromkeys(("num_layers", "width", "num_heads")), "pretrained": False}
    with pytest.raises(InvalidInputError, match=r"alone take .* smaller model .* are not quantized, and become"):
        fitproof.plan(**plan, causal_lm=shape, budget="0.25MiB", space={"micro_batch_size": [1]})
    kept = mixture_of_experts("mixtral", tmp_path, adapter="qlora", qlora_float32_rest=False, weights="bfloat16")
    assert notes_on([kept], CPU)[0].endswith("are not quantized, and keep their 16 bits")
    assert notes_on([tiny(adapter="qlora"), tiny(adapter="lora")], CPU) == ()


def test_many_predictions_are_numbered_as_their_experiments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))
    experiments = [tiny(micro_batch_size=size) for size in (12, 1, 3, 8, 2, 4)]
    made = dict(predict_each(experiments, CPU))
    peaks = [made[number].peak_allocated_bytes for number in range(len(experiments))]
    assert peaks == [predict(experiment, CPU).peak_allocated_bytes for experiment in experiments]
    assert peaks[0] == max(peaks) and peaks[1] == min(peaks)


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda out, q, k, v, *_, **__: sdpa_backward_flop_count(out, q, k, v)
    ),
}


@pytest.mark.parametrize("settings", [{}, {"checkpointing": "every_layer"}, {"accumulation_steps": 4}], ids=str)
def test_operations_equal_those_that_torch_counts(settings: dict[str, Any]) -> None:
    experiment = tiny(micro_batch_size=2, **settings)
    prepared = experiment.prepare()
    step = build_step(experiment, prepared)
    loop = Loop(
        experiment, prepared.train, step, make_optimizer(step.trainable.module, experiment.settings), lambda _: None
    )
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        loop.advance(1)
    assert predict(experiment, CPU).pass_work.flops * experiment.accumulation_steps == counter.get_total_flops()


@pytest.mark.parametrize("kernel", ["cudnn_attention", "efficient_attention", "flash_attention_for_cpu"])
def test_operations_of_attention_are_those_of_every_head_if_heads_share_keys(kernel: str) -> None:
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward").default
    query, key = torch.empty(2, 4, 8, 16, device="meta"), torch.empty(2, 2, 8, 16, device="meta")
    product = 2 * query.numel() * 8  # of all queries with all keys
    counter = WorkCounter("cuda")
    for operator, args, num_products in ((forward, (query, key, key), 2), (backward, (query, query, key, key), 5)):
        counter.count(operator, args, {}, query, {})
        assert counter.take_phase().flops == num_products * product
