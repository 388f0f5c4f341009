"""Models: presets, local folders, shapes and losses."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import ROOT, tiny, with_corpus_of
from transformers import AutoConfig

from pipeline.base.errors import InvalidInputError
from pipeline.config.settings import MODELS
from pipeline.models._support.causal_models import PRESETS, UNPUBLISHED
from pipeline.models._support.published_shapes import HUB_NAMES, MULTIMODAL
from pipeline.models.causal_lm import CausalLm
from pipeline.training.loop import train

NAMES = [name for family in MODELS.values() for name in family.names]
SMALL = [*UNPUBLISHED, "encoder_stack"]
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_248_023_552,
}
"""Of the published checkpoints, the tied head counted once; of gemma-3-4b the text model alone."""


def test_names_are_unique() -> None:
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_every_model_has_a_description_layers_and_float32_weights(name: str) -> None:
    family = next(family() for family in MODELS.values() if name in family.names)
    description = family.describe(name)
    with torch.device("meta"):
        trainable = family.build(name, description.vocabulary_size or 512)
    assert description.kind in ("tokens", "vectors")
    assert len(trainable.layers) >= 2
    assert len({type(layer) for layer in trainable.layers}) == 1
    assert trainable.module.training
    assert {p.dtype for p in trainable.module.parameters()} == {torch.float32}
    inside = set(trainable.module.modules())
    assert all(layer in inside and list(layer.children()) for layer in trainable.layers)


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_published_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        module = CausalLm().build(name, 0).module
    assert sum(p.numel() for p in module.parameters()) == parameters


@pytest.mark.parametrize("name", SMALL)
def test_the_losses_of_micro_batches_add_up_to_the_loss_of_the_window(name: str) -> None:
    experiment = tiny(**with_corpus_of(name))
    prepared = experiment.prepare()
    trainable = experiment.model.build(name, prepared.vocabulary_size)
    batch = prepared.train.batch([0, 1])
    targets = prepared.train.count(batch)[1]
    whole = trainable.loss(trainable.module, batch, targets)
    assert whole.ndim == 0
    halves = [trainable.loss(trainable.module, {k: v[i : i + 1] for k, v in batch.items()}, targets) for i in (0, 1)]
    assert float(sum(halves).detach()) == pytest.approx(float(whole.detach()), rel=1e-5)


def test_auto_is_the_nano_model_on_a_cpu() -> None:
    assert tiny(model="auto").settings.model == "gpt2-nano"


def test_a_model_can_change_its_shape() -> None:
    settings = {"num_layers": 3, "width": 64, "num_heads": 4, "vocabulary_size": 700, "dropout": 0.1}
    for name in UNPUBLISHED:
        config = CausalLm(**settings).build(name, 512).module.config
        shape = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.vocab_size)
        assert shape == (3, 64, 4, 700)
    gpt2 = CausalLm(**settings).build("gpt2-nano", 512).module.config
    assert (gpt2.resid_pdrop, gpt2.embd_pdrop, gpt2.attn_pdrop) == (0.1, 0.1, 0.1)


def test_a_local_folder_is_a_model(tmp_path: Path) -> None:
    built = CausalLm(num_layers=2, width=32, num_heads=2).build("gpt2-nano", 512).module
    built.save_pretrained(tmp_path)
    name = str(tmp_path)
    description = CausalLm().describe(name)
    assert (description.vocabulary_size, description.max_sequence_length) == (512, 256)
    fresh, loaded = CausalLm().build(name, 512).module, CausalLm(pretrained=True).build(name, 512).module
    first = next(built.parameters())
    assert torch.equal(next(loaded.parameters()), first)
    assert not torch.equal(next(fresh.parameters()), first)


def test_the_other_shapes_of_a_folder_follow_its_width_and_heads(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 8, "num_key_value_heads": 4}
    transformers.LlamaConfig(**shape, num_hidden_layers=2, vocab_size=512).save_pretrained(tmp_path)
    config = CausalLm(width=32, num_heads=2).configuration(str(tmp_path), 512)
    assert (config.intermediate_size, config.num_key_value_heads) == (80, 1)
    wide = CausalLm(num_heads=16).configuration(str(tmp_path), 512)
    assert (wide.intermediate_size, wide.num_key_value_heads) == (160, 8)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "OPTConfig": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "MixtralConfig": {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 2},
}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_a_folder_without_a_tokenizer_trains_with_the_corpus_tokenizer(kind: str, tmp_path: Path) -> None:
    shape = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    getattr(transformers, kind)(**shape, **CONFIGURATIONS[kind], max_position_embeddings=64).save_pretrained(tmp_path)
    experiment = tiny(model=str(tmp_path))
    prepared = experiment.prepare()
    assert prepared.vocabulary_size == 512
    received: list[Any] = []
    train(experiment, prepared, received.append)
    assert received[-1].eval_loss == pytest.approx(math.log(512), rel=0.1)


def test_a_folder_with_a_tokenizer_or_pretrained_weights_needs_its_tokenizer(tmp_path: Path) -> None:
    CausalLm(num_layers=2, width=32, num_heads=2).configuration("gpt2-nano", 512).save_pretrained(tmp_path)
    assert not CausalLm().describe(str(tmp_path)).needs_tokenizer
    assert CausalLm(pretrained=True).describe(str(tmp_path)).needs_tokenizer
    (tmp_path / "tokenizer.json").touch()
    assert CausalLm().describe(str(tmp_path)).needs_tokenizer


def test_pretrained_weights_without_a_network_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it reads its variable when it is loaded
    with pytest.raises(
        InvalidInputError, match="could not be loaded: .*; check the network and the name.*pretrained=false"
    ):
        CausalLm(pretrained=True).describe("gpt2")
    with pytest.raises(InvalidInputError, match="could not be loaded"):
        tiny(model="nobody/nothing")


def test_a_model_that_takes_images_is_neither_named_nor_taken(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="gemma-3-4b-pt takes images too, so save its text model to a folder"):
        CausalLm(pretrained=True).describe("gemma-3-4b")
    with pytest.raises(InvalidInputError, match="gemma-3-1b is a shape without weights; set model=google/gemma-3-1b"):
        CausalLm(pretrained=True).describe("gemma-3-1b")
    AutoConfig.for_model("gemma3").save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match="must be a language model alone, and .* is a gemma3 without layers"):
        CausalLm().describe(str(tmp_path))


def test_a_nano_model_has_no_pretrained_weights() -> None:
    with pytest.raises(InvalidInputError, match="gpt2-nano has no published weights"):
        CausalLm(pretrained=True).describe("gpt2-nano")


@pytest.mark.parametrize("name", HUB_NAMES)
def test_a_shape_has_no_pretrained_weights(name: str) -> None:
    remedy = "" if name in MULTIMODAL else "set model="
    with pytest.raises(InvalidInputError, match=f"{name} is a shape without weights; {remedy}{HUB_NAMES[name]}"):
        CausalLm(pretrained=True).describe(name)
    assert CausalLm().describe(name).tokenizer == HUB_NAMES[name]


def test_a_sliding_window_and_other_layers_are_those_of_the_shape() -> None:
    gemma, mistral = (CausalLm().configuration(name, 0) for name in ("gemma-3-1b", "mistral-7b"))
    assert [kind == "full_attention" for kind in gemma.layer_types] == [number % 6 == 5 for number in range(26)]
    assert (gemma.sliding_window, mistral.sliding_window) == (512, None)
    assert CausalLm(num_layers=12).configuration("gemma-3-1b", 0).layer_types == gemma.layer_types[:12]


def test_an_unknown_model_is_refused_with_the_names() -> None:
    with pytest.raises(
        InvalidInputError, match="no model is called 'gpt3'; the models are .*gpt2-medium.*encoder_stack"
    ):
        tiny(model="gpt3")


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(InvalidInputError, match="5 does not divide 32"):
        tiny(model="encoder_stack", corpus="random_vectors", encoder_stack__num_heads=5)


def test_model_and_corpus_must_have_the_same_kind() -> None:
    with pytest.raises(InvalidInputError, match=r"takes vectors \(inputs\), .*; set corpus=random_vectors"):
        tiny(model="encoder_stack")
    with pytest.raises(InvalidInputError, match="takes tokens, .*; set corpus=.*python_docs"):
        tiny(corpus="random_vectors")


def test_the_page_of_models_lists_the_presets_with_their_parameters() -> None:
    listed = re.findall(
        r"^\| `([a-z0-9.-]+)` \| ([\d,]+) \| ([^ ,]+)", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE
    )
    assert {name: int(number.replace(",", "")) for name, number, _ in listed} == PARAMETERS
    assert {name: where for name, _, where in listed if where != name} == HUB_NAMES


def test_every_preset_is_a_published_or_a_nano_model() -> None:
    assert set(PRESETS) == set(PARAMETERS) | set(UNPUBLISHED)
