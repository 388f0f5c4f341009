"""The CUDA context: measured once if the card is in this machine, else an assumed value."""

from pathlib import Path

import pytest
import torch
from conftest import tiny

from pipeline.jobs.plan import _budget_bytes
from pipeline.memory.device import hardware_of
from pipeline.prediction import cuda_context as context
from pipeline.prediction.cards import CONTEXT_BYTES, find_card
from pipeline.prediction.cuda_context import context_bytes_of, measure_context
from pipeline.prediction.predict import predict, predict_all

MIB = 2**20
T4 = find_card("t4")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[torch.device]:
    """Give this machine a T4 whose context takes 321 MiB, and the list of the devices that were asked for it."""
    asked: list[torch.device] = []

    def measure(pool: object, function: object, devices: list[torch.device]) -> list[tuple[int, int]]:
        assert function is measure_context
        asked.extend(devices)
        return [(0, 321 * MIB)]

    monkeypatch.setenv("HEADROOM_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(context, "device_name", lambda device: ["NVIDIA L4", T4.name][device.index])
    monkeypatch.setattr(context, "environment", lambda device: {"device_name": T4.name, "torch": "2", "driver": "1"})
    monkeypatch.setattr(context, "run_all", measure)
    return asked


def test_the_context_is_measured_once(measured: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    assert context_bytes_of(T4) == context_bytes_of(T4) == 321 * MIB
    assert measured == [torch.device("cuda", 1)]
    monkeypatch.setattr(context, "environment", lambda device: {"device_name": T4.name, "torch": "2", "driver": "2"})
    assert context_bytes_of(T4) == 321 * MIB and len(measured) == 2  # by another driver
    assert context_bytes_of(find_card("a100")) == CONTEXT_BYTES and len(measured) == 2


def test_predictions_and_plans_use_the_measured_context(measured: list[torch.device]) -> None:
    alone, [(_, one_of_many)] = predict(tiny(), T4), predict_all([tiny()], T4)
    for prediction in (alone, one_of_many):
        assert prediction.peak_reserved_bytes is not None
        assert prediction.peak_device_bytes == prediction.peak_reserved_bytes + 321 * MIB
    assert _budget_bytes(None, T4) == T4.memory_bytes - 321 * MIB
    assert len(measured) == 1


def test_the_context_of_another_card_has_the_assumed_size() -> None:
    cpu = hardware_of(torch.device("cpu"))
    if not torch.cuda.is_available():
        assert context_bytes_of(T4) == CONTEXT_BYTES
    assert context_bytes_of(cpu) == 0 and _budget_bytes(None, cpu) == cpu.memory_bytes


@pytest.mark.parametrize(
    ("used", "expected"), [((900, 1300), 380), ((None, None), None), ((900, 910), None)], ids=["known", "no", "odd"]
)
def test_reserved_bytes_are_not_part_of_the_context(
    used: tuple[int | None, int | None], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter(used)
    monkeypatch.setattr(context, "used_bytes", lambda device: next(readings))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    assert measure_context(torch.device("cpu")) == expected


@pytest.mark.gpu
def test_a_real_context_takes_some_hundred_mib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADROOM_CACHE", str(tmp_path))
    card = hardware_of(torch.device("cuda", 0))
    taken = context_bytes_of(card)
    assert 50 * MIB < taken < 2048 * MIB and taken == context_bytes_of(card)
    assert len(list(tmp_path.glob("context-*"))) == 1
