"""Deep models are predicted from recordings of few layers: the timeline is the one of a full recording."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from transformers import AutoConfig

from pipeline.config.experiment import Experiment
from pipeline.memory.device import hardware_of
from pipeline.memory.timeline import Timeline, same_memory
from pipeline.models.causal_lm import EQUAL_LAYERS, CausalLm
from pipeline.prediction.cards import find_card
from pipeline.prediction.extrapolate_depth import Depth
from pipeline.prediction.layers import Layers, fewest_layers
from pipeline.prediction.predict import predict
from pipeline.prediction.trace import record, trace

CPU, CARD = hardware_of(torch.device("cpu")), find_card("h100")
NUM_LAYERS = 16
OFFLOADING: dict[str, Any] = {
    "causal_lm__num_layers": 20,
    "activation_offloading": True,
    "offloading_min_mib": 0.01,  # narrow layers save nothing larger
}


def deep(num_layers: int = NUM_LAYERS, **settings: Any) -> Experiment:
    """Return a run of narrow layers."""
    return tiny(**{"micro_batch_size": 2, "causal_lm__num_layers": num_layers, **settings})


@pytest.mark.matrix(2)
@pytest.mark.parametrize("target", [CPU, CARD], ids=["cpu", "cuda"])
@pytest.mark.parametrize(
    "settings",
    [
        {"accumulation_steps": 3, "precision": "bf16", "checkpointing": "every_layer"},
        {"model": "llama-nano", "attention": "eager", "loss_kernel": "fused"},
        {"optimizer_in_backward": True, "max_grad_norm": "none", "gelu": "fused"},
        {"accumulation_steps": 1},
        {"micro_batch_size": 1, "checkpointing": "every_2_layers", "max_grad_norm": "none"},
        {"precision": "bf16", "loss_kernel": "chunked", "checkpointing": "attention_saved"},
    ],
    ids=str,
)
def test_a_deep_model_is_extrapolated_exactly(
    settings: dict[str, Any], target: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_extrapolation(settings, target, monkeypatch, tmp_path)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp16"},
        {"causal_lm__num_layers": 20, "checkpointing": "offloaded", "precision": "bf16"},
        {**OFFLOADING, "checkpointing": "every_layer", "precision": "fp16", "accumulation_steps": 2},
        {**OFFLOADING, "checkpointing": "every_2_layers"},
        {**OFFLOADING, "checkpointing": "attention_saved", "loss_kernel": "chunked"},
    ],
    ids=str,
)
def test_a_deep_model_on_a_card_is_extrapolated_exactly(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_extrapolation({"accumulation_steps": 1, **settings}, CARD, monkeypatch, tmp_path)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", EQUAL_LAYERS)
def test_a_deep_model_in_a_folder_is_extrapolated_exactly(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_configuration(tmp_path / "model", kind, num_hidden_layers=12)
    settings = {"model": str(tmp_path / "model"), "causal_lm__num_layers": None, "accumulation_steps": 1}
    check_extrapolation({**settings, "checkpointing": "every_layer"}, CARD, monkeypatch, tmp_path)


def test_layers_that_attend_in_different_ways_are_not_extrapolated(tmp_path: Path) -> None:
    write_configuration(tmp_path, "qwen3", num_hidden_layers=8, use_sliding_window=True, max_window_layers=4)
    assert CausalLm().describe(str(tmp_path)).num_layers is None
    write_configuration(tmp_path, "qwen3", num_hidden_layers=8)
    assert CausalLm().describe(str(tmp_path)).num_layers == 8
    assert CausalLm(pretrained=True).describe(str(tmp_path)).num_layers is None


def test_an_edited_configuration_is_traced_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))
    peaks = []
    for hidden_act in ("silu", "gelu_new", "silu"):
        write_configuration(tmp_path / "model", "llama", num_hidden_layers=2, hidden_act=hidden_act)
        peaks.append(predict(deep(2, model=str(tmp_path / "model")), CARD).peak_allocated_bytes)
    assert peaks[0] == peaks[2] != peaks[1]


def test_a_configuration_in_bfloat16_is_trained_and_predicted_in_float32(tmp_path: Path) -> None:
    peaks = []
    for dtype in ("bfloat16", "float32"):
        write_configuration(tmp_path / dtype, "llama", num_hidden_layers=2, dtype=dtype)
        experiment = deep(2, model=str(tmp_path / dtype))
        assert {one.dtype for one in experiment.model.build(str(tmp_path / dtype), 512).module.parameters()} == {
            torch.float32
        }
        peaks.append(predict(experiment, CARD).peak_allocated_bytes)
    assert peaks[0] == peaks[1]


def write_configuration(folder: Path, kind: str, **changes: Any) -> None:
    """Write a narrow model's configuration for transformers to a folder."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=512, pad_token_id=None, **{**shape, **changes})
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config.to_json_string())


def check_extrapolation(settings: dict[str, Any], target: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compare the timeline that is extrapolated with the recording of all layers."""
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))
    wanted = deep(**settings)
    prepared, recorded = wanted.read_corpus(), []

    def shallow(experiment: Experiment, *others: Any) -> Timeline:
        recorded.append(experiment.description.num_layers)
        return record(experiment, *others)

    monkeypatch.setattr("pipeline.prediction.trace.record", shallow)
    extrapolated = trace(wanted, target, prepared)
    assert recorded and max(recorded) < NUM_LAYERS
    assert same_memory(extrapolated, all_layers(wanted, target))


def all_layers(wanted: Experiment, target: Any) -> Timeline:
    """Return the recording of all layers."""
    num_rows = min(2, wanted.effective_batch_size // wanted.micro_batch_size) * wanted.micro_batch_size
    num_rows = wanted.effective_batch_size if target is CPU else num_rows
    short = {"accumulation_steps": min(2, wanted.effective_batch_size // wanted.micro_batch_size)}
    short["effective_batch_size"] = short["accumulation_steps"] * wanted.micro_batch_size
    return record(Experiment(wanted.settings.model_copy(update=short)), target, wanted.read_corpus(), num_rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "settings"),
    [
        (CPU, {"model": "qwen3-nano", "loss_kernel": "chunked"}),
        (CARD, {**OFFLOADING, "checkpointing": "attention_saved", "precision": "bf16"}),
        (CPU, {"checkpointing": "every_2_layers", "attention": "eager"}),
        (CARD, {"causal_lm__dropout": 0.1, "precision": "fp16"}),
    ],
    ids=str,
)
def test_layers_that_repeat_at_one_size_repeat_at_others(
    target: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))
    recorded = []

    def shallow(experiment: Experiment, *others: Any) -> Timeline:
        recorded.append((experiment.micro_batch_size, experiment.description.num_layers))
        return record(experiment, *others)

    monkeypatch.setattr("pipeline.prediction.trace.record", shallow)
    for size in (2, 1, 6, 12):  # two, one and several sequences in one of several micro-batches, and a whole batch
        wanted = deep(micro_batch_size=size, effective_batch_size=12, **settings)
        assert same_memory(trace(wanted, target, wanted.read_corpus()), all_layers(wanted, target))
    [few, more] = sorted({num_layers for _, num_layers in recorded})
    sizes_proved = (2, 1, 6, 12) if "activation_offloading" in settings else (2, 12)  # other events, or one pass alone
    expected = [
        (size, count) for size in (2, 1, 6, 12) for count in (few, more) if count == few or size in sizes_proved
    ]
    assert recorded == expected


def test_layers_that_do_not_repeat_are_not_extrapolated() -> None:
    prepared = deep().read_corpus()
    fewest = fewest_layers(NUM_LAYERS, 1)
    shallow, deeper = (record(deep(count), CPU, prepared, 2) for count in (fewest, fewest + 1))
    layers = Layers(fewest, 1, NUM_LAYERS - fewest)
    assert Depth.of(shallow, record(deep(fewest + 2), CPU, prepared, 2), layers) is None
    depth = Depth.of(shallow, deeper, layers)
    assert depth is not None and depth.timeline(shallow) is not None
    assert depth.timeline(replace(shallow, storage_work={})) is None  # the work of the layers is not known
    counted_only_by_phase = Depth.of(replace(shallow, storage_work={}), deeper, layers)
    assert counted_only_by_phase is not None and not counted_only_by_phase.holds_at_other_sizes
    number = next(n for n, one in enumerate(deeper.origins) if one.module.startswith("transformer.h.2."))
    num_bytes_N = deeper.num_bytes_N.copy()
    num_bytes_N[number] += 1
    assert Depth.of(shallow, replace(deeper, num_bytes_N=num_bytes_N), layers) is None


def test_policies_that_name_layers_have_no_period() -> None:
    assert deep().layer_period == 1 and deep(checkpointing="every_3_layers").layer_period == 3
    assert deep(checkpointing="full:0-3").layer_period is None


def test_offloaded_layers_need_more_recorded_layers() -> None:
    """A checkpointed layer saves only its input, which leaves the device when two further ones are on their way."""
    kinds = ({}, OFFLOADING, {**OFFLOADING, "checkpointing": "every_layer"}, {"checkpointing": "offloaded"})
    assert [fewest_layers(20, 1, deep(**each).layer_reach) for each in kinds] == [4, 4, 6, 6]


def test_the_prediction_names_the_layers_of_the_deep_model() -> None:
    modules = predict(deep(), CARD).breakdown.module_bytes
    assert any(module.startswith(f"transformer.h.{NUM_LAYERS - 1}.") for module in modules)
