"""Weights in bfloat16: the training of a plain loop, what else is in bfloat16, and what cannot be combined with it."""

import json
import re
from typing import Any

import pytest
import torch
from conftest import CPU, pairs, tiny, with_corpus_of
from torch import nn
from trainings import SMALL_BATCH, check_peak, check_peak_on_card, loop_of, plainly_trained, trained

from pipeline.config.settings import TECHNIQUES
from pipeline.export.write import export_files
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.training.step import ranks_of, with_parameters

NUM_STEPS = 5
CUTS = {1: {"micro_batch_size": 8, "accumulation_steps": 1}, 4: {"micro_batch_size": 2, "accumulation_steps": 4}}
"""Settings by the number of micro-batches."""


def in_bfloat16(module: nn.Module) -> nn.Module:
    """Return a model whose weights, and whose inputs that are not token ids, are in bfloat16."""
    module.register_forward_pre_hook(lambda _, inputs: tuple(one.to(torch.bfloat16) for one in inputs))
    return module.to(torch.bfloat16)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_micro_batches", CUTS)
@pytest.mark.parametrize("model", ["gpt2-nano", "encoder_stack"])
def test_losses_are_those_of_a_plain_loop(model: str, num_micro_batches: int, precision: str) -> None:
    """To the last bit, and not those of weights in float32."""
    shared = {"precision": precision, "learning_rate": 1e-2, **with_corpus_of(model), **CUTS[num_micro_batches]}
    experiment = tiny(weights="bfloat16", **shared)
    _, loop, records = trained(experiment, NUM_STEPS)
    _, losses, _ = plainly_trained(experiment, loop, NUM_STEPS, in_bfloat16)
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-7)
    _, _, others = trained(tiny(weights="float32", **shared), NUM_STEPS)
    assert [record.loss for record in others] != pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("model", ["gpt2-nano", "llama-nano"])
def test_gradients_and_state_are_in_bfloat16_and_buffers_are_not(model: str) -> None:
    step, loop = loop_of(tiny(model=model, weights="bfloat16"))
    module, optimizer, seen = step.trainable.module, loop.optimizer, set()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: seen.add((one.dtype, one.grad.dtype)))
    loop.advance(1)
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
    peak = check_peak(tiny(weights="bfloat16", **shared), ONEDNN)
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
    check_peak(tiny(weights="bfloat16", sequence_length=64, eval_steps=0, causal_lm__dropout=0.1, **others), ONEDNN)


@pytest.mark.matrix(2)
@pytest.mark.gpu
@pytest.mark.parametrize("others", [*OTHERS, {"optimizer": "sgd", "sgd_momentum": 0.0}], ids=str)
def test_its_peak_on_a_card_is_predicted_where_the_weights_set_it(others: dict[str, Any], card: Any) -> None:
    """Without a state the weights in float32 would be as large as all that training needs: they are not on the card."""
    model = {"model": "gpt2-nano", "causal_lm.num_layers": 4, "causal_lm.width": 256, "causal_lm.num_heads": 4}
    settings = {**model, **SMALL_BATCH, "sequence_length": 16, "vocabulary_size": 4096, "weights": "bfloat16", **others}
    check_peak_on_card(card, settings, error_of_reserved=ONEDNN)


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
    trainable, loop, _ = trained(tiny(weights="bfloat16_master", optimizer=optimizer, learning_rate=1e-2), NUM_STEPS)
    module = trainable.module
    copies = [copy for group in loop.optimizer.param_groups for copy in group["params"]]
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
