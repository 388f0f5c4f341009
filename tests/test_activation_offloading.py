"""Saved tensors on the host: the same training, each storage copied once, and how much memory is left."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EACH_CARD, ROOT, tiny, with_corpus_of
from simulated_programs import execute_on
from test_checkpointing import DROPOUT, LAYERS, OWN, trained
from test_export import losses_here, losses_of_script
from torch import Tensor, nn

from pipeline.export.write import export_files, write_files
from pipeline.memory.device import hardware_of
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.runtime.run import execute
from pipeline.techniques import activation_offloading
from pipeline.techniques._support import offloading
from pipeline.techniques._support.offloading import (
    NUM_LEAVING,
    NUM_RETURNING,
    Offloading,
    offload_saved_tensors,
    offloaded_checkpoint,
)
from pipeline.techniques.activation_offloading import ActivationOffloading

EVERYTHING: dict[str, Any] = {"activation_offloading": True, "offloading_min_mib": 0.0}


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {**with_corpus_of("llama-nano"), "accumulation_steps": 4, "micro_batch_size": 2},
        {"sequences": "padded", "accumulation_steps": 4, "micro_batch_size": 2},
        {**with_corpus_of("encoder_stack"), "checkpointing": "every_layer"},
        {"checkpointing": "attention_saved"},
        OWN,
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_every_weight_is_the_same_after_ten_steps(
    settings: dict[str, Any], short_documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    padded = {"corpus": "text_files", "text_files__path": short_documents} if "sequences" in settings else {}
    alike = {**LAYERS, **DROPOUT, **padded, **settings}
    plain, other = trained(tiny(**alike)), trained(tiny(**alike, **EVERYTHING))
    assert all(torch.equal(one, same) for one, same in zip(plain, other, strict=True))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the elements of each storage that is copied, in either direction, as they are."""
    elements: list[int] = []
    copy = offloading._Waiting._copy

    def noting(self: Any, source: Tensor, target: Tensor) -> Any:
        elements.append(source.numel())
        return copy(self, source, target)

    monkeypatch.setattr(offloading._Waiting, "_copy", noting)
    return elements


def test_views_of_one_storage_are_copied_once_and_come_back_as_they_were(copied: list[int]) -> None:
    values = torch.arange(24.0).reshape(4, 6).requires_grad_()
    offloading = Offloading(smallest_bytes=0)
    offloading.compute_on(values.device)
    with offloading.hooks():
        both = values * 1
        left, right = both[:, :2], both.T[3:]
        result = (left**2).sum() + (right**2).sum() + (both.view(torch.int32).view(torch.float32) ** 0).sum()
    result.backward()
    expected = 2 * values.detach()
    expected[:, 2] = 0
    assert torch.equal(values.grad, expected)  # type: ignore[arg-type]
    assert copied.count(24) == len(copied) <= 4, "the storage and that of its powers' results, there and back"


def test_parameters_and_small_tensors_stay_where_they_are(copied: list[int]) -> None:
    layer = nn.Linear(8, 8, bias=False)
    offload_saved_tensors([layer], smallest_bytes=4 * 32)
    for rows, expected in ((3, []), (4, [32])):
        inputs = torch.ones(rows, 8, requires_grad=True) * 1
        result = layer(inputs).sum()
        assert copied == expected
    del inputs
    result.backward()
    assert layer.weight.grad is not None


def test_layers_without_parameters_are_on_the_device_of_their_inputs(copied: list[int]) -> None:
    layer = nn.ReLU()
    offload_saved_tensors([layer], smallest_bytes=0)
    inputs = torch.ones(4, requires_grad=True)
    layer(input=inputs * 1).sum().backward()
    assert copied and torch.equal(inputs.grad, torch.ones(4))  # type: ignore[arg-type]


class Watched(Offloading):
    """Counts the storages that are on their way back whenever one is used."""

    def _unpack(self, packed: Any) -> Tensor:
        tensor = super()._unpack(packed)
        alive = [waiting for waiting in (known() for known in self._order) if waiting is not None]
        self.__dict__.setdefault("returning", []).append(sum(waiting.is_returning for waiting in alive))
        return tensor


def test_few_storages_are_on_their_way() -> None:
    watched = Watched(smallest_bytes=0)
    watched.compute_on(torch.device("cpu"))
    value = torch.ones(8, requires_grad=True)
    with watched.hooks():
        for _ in range(10):
            value = value.sin()  # saves its argument, which nothing else keeps
    on_device = [known().device_copy is not None for known in watched._order]  # type: ignore[union-attr]
    assert on_device == [False] * (10 - NUM_LEAVING) + [True] * NUM_LEAVING
    value.sum().backward()
    assert watched.returning[:-1] == [NUM_RETURNING] * 9, "the last one that is used has none before it"  # type: ignore[attr-defined]
    assert not any(known() for known in watched._order), "what was used is not kept"


def test_it_is_tried_where_device_and_host_differ() -> None:
    card, cpu = find_hardware("t4"), hardware_of(torch.device("cpu"))
    tried = {each.kind: ActivationOffloading.values_to_try("activation_offloading", each) for each in (card, cpu)}
    assert tried == {"cuda": (False, True), "cpu": (False,)}


@pytest.mark.parametrize("changes", [{}, {"offloading_min_mib": 0.01, "accumulation_steps": 2, "precision": "bf16"}])
def test_the_peak_is_predicted_with_the_copies_that_a_cpu_has(changes: dict[str, Any], tmp_path: Path) -> None:
    experiment = tiny(**{**LAYERS, **EVERYTHING, "sequence_length": 64, **changes})
    result = execute(experiment, tmp_path / "log")
    assert result.memory is not None and result.memory.peak_allocated_bytes is not None
    predicted = predict(experiment, hardware_of(experiment.device)).peak_allocated_bytes
    plain = predict(tiny(**LAYERS, sequence_length=64, **changes), hardware_of(experiment.device))
    assert predicted == pytest.approx(result.memory.peak_allocated_bytes, rel=1e-4)
    assert predicted > 0.9 * plain.peak_allocated_bytes, "host and device are one memory"


def test_copies_on_the_host_of_a_card_are_not_counted() -> None:
    shape: dict[str, Any] = {"sequence_length": 128, "causal_lm__num_layers": 8, "causal_lm__width": 64}
    plain, lean = (predict(tiny(**shape, **each), find_hardware("t4")) for each in ({}, EVERYTHING))
    kept = [each.breakdown.category_bytes["activations"] for each in (plain, lean)]
    assert kept[1] < 0.5 * kept[0]
    assert lean.pass_work.flops == plain.pass_work.flops


def test_the_exported_script_offloads(tmp_path: Path) -> None:
    settings = {**EVERYTHING, "causal_lm__dropout": 0.1}
    files = export_files(tiny(**settings))
    write_files(files, tmp_path)
    assert "pipeline" not in files["train.py"] and "smallest_bytes=0)" in files["lightning_trainer.py"]
    assert losses_of_script(str(tmp_path / "train.py")) == pytest.approx(losses_here(**settings), abs=1e-4)


@pytest.mark.matrix(8)
@pytest.mark.gpu
@pytest.mark.parametrize("settings", [EVERYTHING, {"activation_offloading": True}, {"checkpointing": "offloaded"}])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("card", EACH_CARD)
def test_the_peak_of_a_card_is_predicted(
    card: str | None, settings: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    shape = {"sequence_length": 256, "causal_lm__width": 128, "causal_lm__num_heads": 4, "causal_lm__num_layers": 4}
    experiment = tiny(device="cuda", precision=precision, **shape, **settings)
    result = execute_on(card, experiment, tmp_path / "log")
    assert result.memory is not None and result.memory.peak_allocated_bytes is not None, result.detail
    predicted = predict(experiment, find_hardware(card) if card else hardware_of(experiment.device))
    assert predicted.peak_allocated_bytes == pytest.approx(result.memory.peak_allocated_bytes, rel=5e-4)


def test_hooks_inside_of_a_checkpoint_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of transformers checkpoint the call of a layer."""
    both, alone = (tiny(**EVERYTHING, **more) for more in ({"checkpointing": "every_layer"}, {}))
    monkeypatch.setattr(activation_offloading, "HOOKS_ARE_OUTSIDE", False)
    assert "set checkpointing=offloaded and activation_offloading=false" in str(both.unsupported())
    assert alone.unsupported() is None
    monkeypatch.setattr(activation_offloading, "HOOKS_ARE_OUTSIDE", True)
    assert both.unsupported() is None


def test_a_checkpointed_layer_may_get_its_inputs_by_name() -> None:
    inputs = torch.ones(3, requires_grad=True)
    for result in (
        offloaded_checkpoint()(torch.square, input=inputs),
        offloaded_checkpoint()(partial(torch.square, input=inputs)),
    ):
        result.sum().backward()
    assert inputs.grad is not None and inputs.grad.tolist() == [4.0] * 3
