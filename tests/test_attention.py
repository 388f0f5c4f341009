"""The implementation of attention: chosen by transformers' own method, and refused where a model or device lacks it."""

from typing import Any

import pytest
from conftest import tiny, with_corpus_of
from test_prediction import CPU

from pipeline.models.causal_lm import CausalLm
from pipeline.prediction.cards import find_hardware
from pipeline.techniques import attention as technique
from pipeline.techniques.attention import Attention
from pipeline.training.step import build_step


@pytest.mark.parametrize(("value", "name"), [("sdpa", "sdpa"), ("eager", "eager")])
def test_the_model_computes_attention_as_chosen(value: str, name: str) -> None:
    experiment = tiny(attention=value)
    module: Any = build_step(experiment, experiment.prepare()).trainable.module
    assert module.config._attn_implementation == name


def test_a_model_with_an_attention_of_its_own_keeps_it() -> None:
    assert tiny(**with_corpus_of("encoder_stack")).unsupported(CPU) is None
    assert tiny(**with_corpus_of("encoder_stack"), attention="eager").unsupported(CPU) == (
        "attention=eager needs a model of transformers that can be set to eager, and encoder_stack has an attention of "
        "its own; set attention=sdpa"
    )


def test_a_folder_has_what_the_class_of_its_model_supports(tmp_path: Any) -> None:
    for name, known in (("llama", ("eager", "sdpa", "flash_attention_2")), ("bloom", ())):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(f'{{"model_type": "{name}"}}')
        assert CausalLm().attention_implementations(str(folder)) == known


@pytest.mark.parametrize(
    ("card", "precision", "reason"),
    [
        ("cpu", "bf16", "needs a CUDA GPU, and the device is cpu; set attention=sdpa"),
        ("t4", "fp16", "needs compute capability 8.0 (Ampere) or newer, and Tesla T4 is older; set attention=sdpa"),
        ("h100", "bf16", "needs the package flash_attn, and it is not installed; install it, or set attention=sdpa"),
        ("h100", "fp32", "computes in 16 bits, and precision is fp32; set precision=bf16 or attention=sdpa"),
    ],
)
def test_flash_is_refused_with_the_reason(
    card: str, precision: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(technique, "find_spec", lambda name: None)
    target = CPU if card == "cpu" else find_hardware(card)
    assert reason in str(tiny(attention="flash", precision=precision).unsupported(target))
    assert "flash" not in Attention.values_to_try("attention", target)


def test_flash_runs_where_its_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique, "find_spec", lambda name: object())
    assert tiny(attention="flash", precision="bf16").unsupported(find_hardware("h100")) is None
