"""QLoRA: the training of a plain loop with peft and bitsandbytes, what is frozen, predicted peaks, exports, errors."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CPU, pairs, tiny
from test_adapter import LORA, adapters_alone_are_trained
from test_export import run_framework
from test_export_axolotl import exported
from torch import nn
from trainings import SMALL_BATCH, check_cuts, check_peak, check_peak_on_card, loop_of, losses, plainly_trained, trained

from pipeline.export.write import export_files, write_files
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.techniques._support.lora import linear_layers

QLORA: dict[str, Any] = {**LORA, "adapter": "qlora"}
BFLOAT16_REST = {"weights": "bfloat16", "qlora_float32_rest": False}
MODELS = ("gpt2-nano", "llama-nano")


def plain_model(settings: Any, module: nn.Module) -> Any:
    """Return a model with 4-bit layers and adapters, made with bitsandbytes and peft alone."""
    from bitsandbytes.nn import Linear4bit, Params4bit
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if settings.weights == "bfloat16":
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    kind = {"compress_statistics": settings.qlora_double_quantization, "quant_type": "nf4"}
    names = [name for name, _ in module.named_modules() if re.search(r"\.\d+\..*(proj|c_attn|c_fc)$", name)]
    for name in names:
        part: Any = module.get_submodule(name)
        weight = part.weight.data if isinstance(part, nn.Linear) else part.weight.data.t()
        with torch.random.fork_rng():
            made: Any = Linear4bit(*weight.t().shape, compute_dtype=weight.dtype, **kind)
        made.weight, made.bias = Params4bit(weight, requires_grad=False, module=made, **kind), part.bias
        module.set_submodule(name, made)
    module.to("cpu")
    module.is_loaded_in_4bit = True  # type: ignore[assignment]
    if settings.qlora_float32_rest:
        prepare_model_for_kbit_training(module, use_gradient_checkpointing=False)
    ends = sorted({name.rpartition(".")[2] for name in names})
    adapted = get_peft_model(module, LoraConfig(r=4, lora_alpha=8, target_modules=ends))
    if settings.precision == "bf16":  # not before: peft rounds the adapters that it draws to the type of the layer
        for part in module.modules():
            if isinstance(part, Linear4bit):
                part.compute_dtype = torch.bfloat16
    return adapted


@pytest.mark.matrix(1)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which get_peft_model reads
@pytest.mark.parametrize(
    "more",
    [{}, {"qlora_double_quantization": False}, {"precision": "bf16"}, {"weights": "bfloat16"}, BFLOAT16_REST],
    ids=str,
)
@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_of_a_plain_loop_with_peft_and_bitsandbytes(model: str, more: dict[str, Any]) -> None:
    experiment = tiny(**QLORA, **more, model=model, micro_batch_size=2, accumulation_steps=4)
    _, loop, records = trained(experiment)
    _, expected, norms = plainly_trained(experiment, loop, 10, partial(plain_model, experiment.settings))
    assert [record.loss for record in records] == pytest.approx(expected, rel=1e-5)
    assert [record.grad_norm for record in records] == pytest.approx(norms, rel=1e-4)
    whole = losses(tiny(**LORA, weights=more.get("weights", "float32"), model=model))
    assert whole != pytest.approx(expected, rel=1e-6), "4 bits round the weights"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("model", MODELS)
def test_losses_do_not_depend_on_the_micro_batch_size(model: str) -> None:
    check_cuts(**QLORA, model=model)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("checkpointing", ["every_layer", "attention_saved", "offloaded"])
def test_checkpointed_layers_train_the_same(model: str, checkpointing: str) -> None:
    settings = {**QLORA, "model": model, "adapter_dropout": 0.1, "causal_lm__dropout": 0.1}
    assert losses(tiny(**settings, checkpointing=checkpointing)) == pytest.approx(losses(tiny(**settings)), rel=1e-5)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "more", [{}, {"weights": "bfloat16"}, BFLOAT16_REST, {"adapter_targets": "attention"}], ids=str
)
@pytest.mark.parametrize("model", MODELS)
def test_all_linear_layers_have_4_bits_and_adapters_alone_are_trained(model: str, more: dict[str, Any]) -> None:
    experiment = tiny(**QLORA, model=model, **more)
    trainable = adapters_alone_are_trained(experiment)
    whole = experiment.model.build(model, experiment.prepare().vocabulary_size)
    for layer, own in zip(trainable.layers, whole.layers, strict=True):
        for name, linear in linear_layers(own).items():
            found: Any = layer.get_submodule(name)
            weight = getattr(found, "base_layer", found).weight
            assert weight.dtype == torch.uint8 and weight.numel() == linear.weight.numel() // 2  # type: ignore[union-attr, operator]
    named = trainable.module.named_parameters()
    rest = {part.dtype for name, part in named if "norm" in name or "ln_" in name or "embed" in name}
    assert rest == {torch.bfloat16 if more == BFLOAT16_REST else torch.float32} or model == "gpt2-nano"


def test_it_can_be_trained_after_an_evaluation() -> None:
    """On a CPU with AVX512-BF16 bitsandbytes would repack the weights for inference, and they could not be trained."""
    records = trained(tiny(**QLORA, eval_steps=1))[2]
    again: list[Any] = []
    step, loop = loop_of(tiny(**QLORA), again.append)
    step.trainable.module.eval()
    with torch.no_grad():
        step.trainable.loss(step.trainable.module, loop.window(0).batches[0], 1)
    step.trainable.module.train()
    loop.advance(10)
    assert [record.loss for record in again] == [record.loss for record in records]


OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"qlora_double_quantization": False},
    {"weights": "bfloat16"},
    BFLOAT16_REST,
    {"adapter_weights": "bfloat16"},
    {"adapter_targets": "attention"},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"checkpointing": "every_layer"},
    {"max_grad_norm": None, "optimizer_in_backward": True},
    {"optimizer": "muon"},
    {"optimizer": "adamw_8bit"},
    {"optimizer": "adamw_8bit", "precision": "bf16", "qlora_double_quantization": False},
)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("model", "others"), pairs(MODELS, OTHERS))
def test_its_peak_is_predicted(model: str, others: dict[str, Any]) -> None:
    """With few tokens it is reached where the weights are quantized, otherwise in the training."""
    wide = {"model": model, "vocabulary_size": 300, "causal_lm__width": 96, "eval_steps": 0}
    for batch in (SMALL_BATCH, {"micro_batch_size": 8, "accumulation_steps": 1, "sequence_length": 128}):
        check_peak(tiny(**{**wide, **batch, "adapter": "qlora", **others}))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("others", [{"loss_kernel": "chunked"}, {"attention": "eager"}, {"optimizer": "sgd"}], ids=str)
def test_its_peak_is_predicted_with_other_levers(others: dict[str, Any]) -> None:
    shared: dict[str, Any] = {"sequence_length": 64, "eval_steps": 0, "adapter_dropout": 0.1, "causal_lm__dropout": 0.1}
    check_peak(tiny(adapter="qlora", **shared, **others))


@pytest.mark.gpu
@pytest.mark.matrix(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("others", OTHERS, ids=str)
def test_its_peak_on_a_card_is_predicted(others: dict[str, Any], model: str, card: Any) -> None:
    """Its own CUDA library runs there; products of few rows take its kernel that unpacks the weight by itself."""
    shape = {"model": model, "causal_lm.num_layers": 4, "causal_lm.width": 256, "causal_lm.num_heads": 4}
    for batch in (SMALL_BATCH, {"micro_batch_size": 2, "accumulation_steps": 4, "adapter_dropout": 0.1}):
        settings = {**shape, "vocabulary_size": 4096, "sequence_length": 64, **batch, "adapter": "qlora", **others}
        if others.get("optimizer_in_backward"):
            settings |= {"accumulation_steps": 1}
        check_peak_on_card(card, settings, error_of_reserved=0.03)


def test_a_card_never_holds_the_whole_model() -> None:
    """Each weight is quantized as it arrives: the 16-bit weights are never there together."""
    wide: dict[str, Any] = {"model": "llama-nano", "weights": "bfloat16", "vocabulary_size": 300, **SMALL_BATCH}
    wide |= {"causal_lm__width": 1024, "causal_lm__num_layers": 4, "causal_lm__num_heads": 8}
    a100 = find_hardware("a100")
    whole = predict(tiny(adapter="lora", **wide), a100).peak_allocated_bytes
    quantized = predict(tiny(adapter="qlora", qlora_float32_rest=False, **wide), a100).peak_allocated_bytes
    assert quantized < 0.6 * whole


@pytest.mark.parametrize(
    "framework",
    [
        "hugging_face",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("accelerate", "lightning", "deepspeed")),
    ],
)
def test_a_framework_trains_the_same(framework: str, tmp_path: Path) -> None:
    experiment = tiny(**QLORA, micro_batch_size=2, effective_batch_size=8, checkpointing="every_layer")
    write_files(export_files(experiment), tmp_path)
    assert run_framework(framework, tmp_path) == pytest.approx(losses(experiment, 4), abs=1e-4)


def test_exports_have_it_in_python() -> None:
    files = export_files(tiny(**QLORA, qlora_double_quantization=False))
    for name in ("train.py", "accelerate_setup.py", "lightning_trainer.py", "training_arguments.py"):
        assert "Linear4bit(" in files[name] and "double_quantization=False,\n" in files[name]
    keys, words = exported(**QLORA, **{"qlora_double_quantization": False, **BFLOAT16_REST})
    assert keys["adapter"] == "qlora" and keys["load_in_4bit"] and not keys["lora_fan_in_fan_out"]
    assert keys["bnb_config_kwargs"] == {"bnb_4bit_use_double_quant": False}
    assert "axolotl converts norms, embeddings and head to float32" in words
    assert "bnb_config_kwargs" not in exported(**QLORA)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"adapter": "lora", "qlora_double_quantization": False},
            "qlora_double_quantization=false is a setting of adapter=qlora, and adapter is lora; set adapter=qlora or",
        ),
        ({"qlora_float32_rest": False}, "is a setting of adapter=qlora, and adapter is none"),
        ({"adapter": "qlora", "qlora_float32_rest": False}, "set weights=bfloat16 or qlora_float32_rest=true"),
        ({"adapter": "qlora", "compile": "layers"}, "set compile=none or adapter=lora"),
    ],
)
def test_what_has_no_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    reason = tiny(**changes).unsupported(CPU)
    assert reason is not None and re.search(message, reason)
    assert tiny(adapter="qlora").unsupported(CPU) is None


def test_without_bitsandbytes_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.techniques.adapter.find_spec", lambda name: None if name == "bitsandbytes" else True)
    reason = tiny(adapter="qlora").unsupported(CPU)
    assert reason is not None and "needs the package bitsandbytes, which is not installed" in reason
    assert "adapter=lora" in reason and tiny(adapter="lora").unsupported(CPU) is None


def test_a_card_without_kernels_for_4_bits_is_refused() -> None:
    older = replace(find_hardware("h100"), capability=(5, 2), name="Tesla M40")
    reason = tiny(adapter="qlora").unsupported(older)
    assert reason is not None and "from compute capability 6.0 (Pascal) on, and Tesla M40 is older; set" in reason
