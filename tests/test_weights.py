"""Weights in bfloat16: the training of a plain loop, what else is in bfloat16, and what cannot be combined with it."""

import json
import re
from typing import Any

import pytest
import torch
from conftest import TINY, pairs, tiny, with_corpus_of
from test_prediction import CPU, measured
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from pipeline.base.results import StepRecord
from pipeline.base.technique import Mathematics
from pipeline.config.configurations import why_refused
from pipeline.config.entry_points import yaml_file
from pipeline.config.settings import TECHNIQUES
from pipeline.config.variants import read_yaml
from pipeline.export.write import export_files
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.searching.experiment_problem import make_experiment_problem
from pipeline.training.loop import Loop, learning_rate
from pipeline.training.step import build_step, ranks_of, with_parameters

NUM_STEPS = 5
CUTS = {1: {"micro_batch_size": 8, "accumulation_steps": 1}, 4: {"micro_batch_size": 2, "accumulation_steps": 4}}
"""Settings by the number of micro-batches."""
SMALL_BATCH: dict[str, Any] = {"sequence_length": 8, "micro_batch_size": 1, "effective_batch_size": 1, "eval_steps": 0}
"""Parameters, gradients and optimizer state are most of the peak."""


@pytest.mark.matrix(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_micro_batches", CUTS)
@pytest.mark.parametrize("model", ["gpt2-nano", "encoder_stack"])
def test_losses_are_those_of_a_plain_loop(model: str, num_micro_batches: int, precision: str) -> None:
    """To the last bit, and not those of weights in float32."""
    shared = {"precision": precision, "learning_rate": 1e-2, **with_corpus_of(model), **CUTS[num_micro_batches]}
    records: dict[str, list[StepRecord]] = {"bfloat16": [], "float32": []}
    for weights, received in records.items():
        experiment = tiny(weights=weights, **shared)
        prepared = experiment.prepare()
        torch.manual_seed(0)
        step = build_step(experiment, prepared)
        make = step.make_optimizer
        loop = Loop(experiment, prepared.train, step, make(step.trainable.module), received.append)
        with step.run_context():
            loop.advance(NUM_STEPS)
    torch.manual_seed(0)
    plain = experiment.model.build(experiment.settings.model, prepared.vocabulary_size)
    module = plain.module.to(torch.bfloat16)
    optimizer = AdamW(module.parameters(), weight_decay=0.01, fused=True)
    losses = []
    for number in range(NUM_STEPS):
        window = loop.window(number)
        total = torch.zeros(())
        for batch in window.batches:
            inputs = {name: part.to(torch.bfloat16) if name == "inputs" else part for name, part in batch.items()}
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = plain.loss(module, inputs, window.num_targets)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        clip_grad_norm_(module.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(number, experiment.settings, 8)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    assert [record.loss for record in records["bfloat16"]] == pytest.approx(losses, rel=1e-7)
    assert [record.loss for record in records["float32"]] != pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("model", ["gpt2-nano", "llama-nano"])
def test_gradients_and_state_are_in_bfloat16_and_buffers_are_not(model: str) -> None:
    experiment = tiny(model=model, weights="bfloat16")
    prepared = experiment.prepare()
    step = build_step(experiment, prepared)
    module = step.trainable.module
    optimizer = step.make_optimizer(module)
    seen = set()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: seen.add((one.dtype, one.grad.dtype)))
    Loop(experiment, prepared.train, step, optimizer, lambda _: None).advance(1)
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    states = [optimizer.state[parameter] for parameter in module.parameters()]
    assert {state["exp_avg_sq"].dtype for state in states} == {torch.bfloat16}
    floats = {buffer.dtype for buffer in module.buffers() if buffer.is_floating_point()}
    assert floats == ({torch.float32} if model == "llama-nano" else set()), "rotary frequencies stay in float32"
    if model == "gpt2-nano":
        assert module.get_submodule("lm_head").weight is module.get_submodule("transformer.wte").weight


ONEDNN = 0.03
"""What oneDNN takes besides for products in bfloat16 of such small models, as a share of the peak: not predicted."""
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "bf16"},
    {"max_grad_norm": None, "optimizer_in_backward": True},
    {"optimizer": "adafactor"},
    {"optimizer": "sgd"},
    {"optimizer": "muon"},
)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("model", "others"), pairs(["gpt2-nano", "encoder_stack"], OTHERS))
def test_its_peak_is_predicted_where_the_weights_set_it(model: str, others: dict[str, Any]) -> None:
    wide = {"vocabulary_size": 300, "causal_lm__width": 96, "encoder_stack__width": 96}
    shared = {**SMALL_BATCH, **wide, **with_corpus_of(model), **others}
    experiment = tiny(weights="bfloat16", **shared)
    peak = measured(experiment)
    assert predict(experiment, CPU).peak_allocated_bytes == pytest.approx(peak, rel=ONEDNN)
    assert peak < 0.75 * predict(tiny(**shared), CPU).peak_allocated_bytes


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "others",
    [
        {"loss_kernel": "chunked"},
        {"checkpointing": "every_layer"},
        {"checkpointing": "offloaded"},
        {"attention": "eager"},
        {"gelu": "fused"},
        {"micro_batch_size": 2},
    ],
    ids=str,
)
def test_its_peak_is_predicted_with_other_levers(others: dict[str, Any]) -> None:
    experiment = tiny(weights="bfloat16", sequence_length=64, eval_steps=0, causal_lm__dropout=0.1, **others)
    assert predict(experiment, CPU).peak_allocated_bytes == pytest.approx(measured(experiment), rel=ONEDNN)


@pytest.mark.matrix(2)
@pytest.mark.gpu
@pytest.mark.parametrize("others", [*OTHERS, {"optimizer": "sgd", "sgd_momentum": 0.0}], ids=str)
def test_its_peak_on_a_card_is_predicted_where_the_weights_set_it(others: dict[str, Any], card: Any) -> None:
    """Without a state the weights in float32 would be as large as all that training needs: they are not on the card."""
    model = {"model": "gpt2-nano", "causal_lm.num_layers": 4, "causal_lm.width": 256, "causal_lm.num_heads": 4}
    settings = {**model, **SMALL_BATCH, "sequence_length": 16, "vocabulary_size": 4096, "weights": "bfloat16", **others}
    predicted, real = (card.ask(kind=kind, settings=settings) for kind in ("predict", "measure"))
    assert real["outcome"] == "ok"
    assert predicted["predicted_allocated_bytes"] == pytest.approx(real["measured_allocated_bytes"], rel=5e-4)
    assert predicted["predicted_reserved_bytes"] == pytest.approx(real["measured_reserved_bytes"], rel=ONEDNN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp16"}, "needs no loss scaling, and precision=fp16 .* set precision=bf16 or fp32, or weights"),
        ({"precision": "tf32"}, "no matrix product in float32, and precision=tf32 .* set precision=bf16 or fp32, or"),
        ({"loss_kernel": "fused"}, "summed in float32, and loss_kernel=fused .* set loss_kernel=chunked"),
    ],
)
def test_a_combination_without_a_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    gpu, run = find_hardware("a100"), tiny(weights="bfloat16", **changes)
    weights: Any = TECHNIQUES["weights"]
    [reason] = weights(weights="bfloat16").refusals(run.settings, gpu, run.model)
    assert re.search(message, reason)
    assert not [*weights().refusals(tiny(**changes).settings, gpu, run.model)]


def test_a_card_without_bfloat16_is_refused() -> None:
    reason = tiny(weights="bfloat16").unsupported(find_hardware("t4"))
    assert reason is not None and reason.endswith("Tesla T4 is older; set weights=float32")
    assert (
        tiny(weights="bfloat16").unsupported(find_hardware("a100")) is tiny().unsupported(find_hardware("t4")) is None
    )


def test_deepspeed_says_that_it_cannot() -> None:
    files = export_files(tiny(weights="bfloat16"))
    missing = "This is not the training that was measured: it is without weights=bfloat16"
    assert missing in files["deepspeed_setup.py"] and missing in files["deepspeed.json"]
    for name in ("train.py", "accelerate_setup.py", "lightning_trainer.py", "training_arguments.py"):
        assert missing not in files[name] and "convert_to_bfloat16(model)" in files[name]


def test_changes_of_the_optimizer_add_up() -> None:
    experiment, changed = tiny(weights="bfloat16_master"), list[Any]()
    step = with_parameters(experiment, experiment.model.build("gpt2-nano", 512), ranks_of(experiment))
    optimizer = step.make_optimizer(step.trainable.module)
    step.with_changed_optimizer(changed.append).change_optimizer(optimizer)
    assert changed == [optimizer] and optimizer.param_groups[0]["params"][0].dtype == torch.float32


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_master_weights_are_updated_in_float32_and_rounded(optimizer: str) -> None:
    """As a plain loop with a float32 copy of each parameter, of whichever optimizer."""
    experiment = tiny(weights="bfloat16_master", optimizer=optimizer, learning_rate=1e-2)
    prepared = experiment.prepare()
    torch.manual_seed(0)
    step = build_step(experiment, prepared)
    module = step.trainable.module
    optimizer_of_copies = step.make_optimizer(module)
    copies = [copy for group in optimizer_of_copies.param_groups for copy in group["params"]]
    loop = Loop(experiment, prepared.train, step, optimizer_of_copies, lambda _: None)
    loop.advance(NUM_STEPS)
    assert {copy.dtype for copy in copies} == {torch.float32} and {p.dtype for p in module.parameters()} == {
        torch.bfloat16
    }
    assert all(parameter.grad is None for parameter in [*module.parameters(), *copies])
    rounded = {copy.to(torch.bfloat16).float().sum().item() for copy in copies}
    assert rounded == {parameter.float().sum().item() for parameter in module.parameters()}
    assert any(not torch.equal(copy, copy.to(torch.bfloat16).float()) for copy in copies), "copies are not rounded"
    reason = tiny(weights="bfloat16_master", optimizer_in_backward=True, max_grad_norm=None).unsupported()
    assert reason is not None and "weights=bfloat16_master copies of it" in reason


def test_deepspeed_has_a_key_for_master_weights() -> None:
    files = export_files(tiny(weights="bfloat16_master", precision="bf16"))
    configuration = json.loads(files["deepspeed.json"])
    assert configuration["bf16"] == {"enabled": True} and "torch_autocast" not in configuration
    assert "with_master_weights(torch.optim.AdamW(" in files["train.py"]


def test_a_search_has_it_only_if_another_training_is_asked_for() -> None:
    assert "weights" not in read_yaml(yaml_file("search"))["space"]
    reason = why_refused(tiny(weights="bfloat16"), {"weights": "bfloat16"}, CPU, Mathematics.ROUNDING)
    assert reason is not None and "set mathematics=different to allow it" in reason
    space = {"micro_batch_size": [4], "weights": ["float32", "bfloat16"], "checkpointing": ["none", "every_layer"]}
    settings = {**TINY, "budget": "1GiB", "effective_batch_size": 4, "space": space, "mathematics": "different"}
    problem = make_experiment_problem(settings)
    answer = {"micro_batch_size": 4, "weights": "bfloat16", "checkpointing": "every_layer"}
    assert problem.baseline_beside(answer) == [{**answer, "checkpointing": "none"}]
