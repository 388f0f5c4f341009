"""GELU in one kernel: the same function where a model computes it in separate operators, and refused elsewhere."""

from typing import Any

import pytest
import torch
from conftest import tiny, with_corpus_of
from test_prediction import CPU, measured
from torch import nn
from transformers.activations import ACT2FN

from pipeline.base.errors import InvalidInputError
from pipeline.techniques.gelu import REPLACED, fuse_gelus
from pipeline.training.step import build_step


@pytest.mark.parametrize("name", REPLACED)
def test_every_form_that_is_replaced_is_the_same_function(name: str) -> None:
    model = nn.Sequential(nn.Sequential(ACT2FN[name]), nn.Linear(2, 2))
    values = torch.linspace(-6, 6, 1001)
    before = model[0](values)
    fuse_gelus(model)
    assert isinstance(model[0][0], nn.GELU)
    torch.testing.assert_close(model[0](values), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gelu", "quick_gelu", "silu"])
def test_other_functions_are_left_alone(name: str) -> None:
    model = nn.Sequential(ACT2FN[name])
    kept = model[0]
    fuse_gelus(model)
    assert model[0] is kept


def test_a_module_that_is_used_in_several_places_is_replaced_in_all() -> None:
    shared: Any = ACT2FN["gelu_new"]
    model = nn.Sequential(shared, nn.Linear(2, 2), shared)
    fuse_gelus(model)
    assert isinstance(model[0], nn.GELU) and isinstance(model[2], nn.GELU)


def test_every_layer_of_gpt2_has_it_in_less_memory() -> None:
    experiment = tiny(gelu="fused")
    module = build_step(experiment, experiment.prepare()).trainable.module
    assert sum(isinstance(part, nn.GELU) for part in module.modules()) == 2
    assert measured(experiment) < 0.9 * measured(tiny())


@pytest.mark.parametrize(
    ("model", "activation"), [("llama-nano", "silu"), ("encoder_stack", "not one of transformers")]
)
def test_a_model_without_it_refuses(model: str, activation: str) -> None:
    """So a space in which it is a dimension does not have every configuration of such a model twice."""
    assert tiny(**with_corpus_of(model)).unsupported(CPU) is None
    reason = str(tiny(**with_corpus_of(model), gelu="fused").unsupported(CPU))
    assert reason.startswith("gelu=fused replaces gelu_new, ")
    assert reason.endswith(f"and the activation of {model} is {activation}; set gelu=model")


def test_a_model_in_which_nothing_is_replaced_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.techniques.gelu.fuse_gelus", lambda _: 0)
    experiment = tiny(gelu="fused")
    with pytest.raises(InvalidInputError, match="the model has none; set gelu=model"):
        build_step(experiment, experiment.prepare())
