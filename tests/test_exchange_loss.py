"""The timeline with another loss is derived from others: it is the one of a recording, or there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny

from pipeline.config.experiment import Experiment
from pipeline.memory.device import hardware_of
from pipeline.memory.timeline import Timeline, same_memory
from pipeline.prediction.exchange_loss import with_other_loss
from pipeline.prediction.families import derivation_round
from pipeline.prediction.loss_difference import difference_of
from pipeline.prediction.recording import record
from pipeline.prediction.trace import trace
from pipeline.techniques.loss_kernel import LossKernel

CPU = hardware_of(torch.device("cpu"))


def recorded(**settings: Any) -> Timeline:
    """Return the recorded timeline of two optimizer steps."""
    experiment = tiny(**{"micro_batch_size": 2, "accumulation_steps": 2, "causal_lm__num_layers": 3, **settings})
    return record(experiment, experiment.read_corpus(), experiment.effective_batch_size)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("common", "inside"),
    [
        ({}, {"checkpointing": "every_layer"}),
        ({"precision": "bf16"}, {"checkpointing": "attention_saved", "gelu": "fused"}),
        (
            {"precision": "fp16", "causal_lm__dropout": 0.1},
            {"checkpointing": "every_2_layers", "attention": "eager"},
        ),
        ({"model": "llama-nano", "sequences": "padded"}, {"checkpointing": "full:1-2", "causal_lm__num_layers": 5}),
        (
            {"precision": "bf16", "accumulation_steps": 1, "optimizer_in_backward": True, "max_grad_norm": "none"},
            {"checkpointing": "every_layer"},
        ),
    ],
    ids=str,
)
def test_another_loss_takes_the_place_of_the_models_own(common: dict[str, Any], inside: dict[str, Any]) -> None:
    own, timeline = recorded(**common), recorded(**common, **inside)
    for loss in ("chunked", "fused"):
        other = recorded(**common, loss_kernel=loss)
        difference = difference_of(own, other)
        assert difference is not None
        derived = with_other_loss(timeline, difference)
        assert derived is not None
        assert same_memory(derived, recorded(**common, **inside, loss_kernel=loss)), loss


def test_nothing_is_derived_where_the_timelines_differ_around_the_loss() -> None:
    own, other = recorded(), recorded(loss_kernel="chunked")
    difference = difference_of(own, other)
    assert difference is not None
    assert with_other_loss(recorded(precision="bf16"), difference) is None
    assert with_other_loss(recorded(micro_batch_size=4, accumulation_steps=1), difference) is None
    of_more = difference_of(own, recorded(loss_kernel="chunked", checkpointing="every_layer"))
    assert of_more is None or with_other_loss(own, of_more) is None


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("size", "more"),
    [
        (2, {}),
        (16, {"precision": "bf16"}),
        (4, {"activation_offloading": True, "offloading_min_mib": 0.01}),
        (
            2,
            {
                "model": "llama-nano",
                "accumulation_steps": 1,
                "optimizer_in_backward": True,
                "max_grad_norm": "none",
            },
        ),
    ],
    ids=str,
)
def test_a_trace_is_derived_if_the_others_are_in_the_cache(
    size: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At a large micro-batch it is derived from small ones."""
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))
    recorded_sizes: list[int] = []

    def counted(experiment: Experiment, *others: Any) -> Timeline:
        recorded_sizes.append(experiment.micro_batch_size)
        return record(experiment, *others)

    monkeypatch.setattr("pipeline.prediction.trace.record", counted)
    sizes = {size} if size <= 8 else {2, 4, 8}  # with another loss 16 sequences may be in more chunks
    layers = {"causal_lm__num_layers": 3, "accumulation_steps": 2, **more}
    inside = {"checkpointing": "every_layer"}
    for number, settings in ((0, {}), (1, {"loss_kernel": "chunked"}), (0, inside)):
        for known in sorted(sizes | {size} if "loss_kernel" in settings else sizes):
            given = tiny(**{**layers, **settings, "micro_batch_size": known})
            assert derivation_round(given) == number
            trace(given, CPU, given.read_corpus())
    wanted = tiny(**{**layers, **inside, "loss_kernel": "chunked", "micro_batch_size": size})
    assert derivation_round(wanted) == 2
    num_recorded = len(recorded_sizes)
    derived = trace(wanted, CPU, wanted.read_corpus())
    assert len(recorded_sizes) == num_recorded
    assert same_memory(derived, record(wanted, wanted.read_corpus(), wanted.effective_batch_size))


def test_a_loss_that_cannot_be_left_out_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossKernel, "active", True)
    assert derivation_round(tiny(loss_kernel="chunked", checkpointing="every_layer")) == 0
