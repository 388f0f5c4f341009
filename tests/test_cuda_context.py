"""The CUDA context: measured once a week if the card is in this machine, else an assumed value."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from conftest import TINY, own_cache, tiny

from pipeline.base.results import Outcome, Result
from pipeline.config.experiment import Experiment
from pipeline.jobs.plan_settings import budget_bytes_on
from pipeline.memory.device import hardware_of
from pipeline.prediction import cuda_context as context
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.cuda_context import measure_context, trainings
from pipeline.prediction.predict import predict, predict_each
from pipeline.simulation.cards import ASSUMED_CONTEXT, T4_CONTEXT

MIB = 2**20
T4 = find_hardware("t4")
CPU = torch.device("cpu")
context_bytes_of = context.context_bytes_of.__wrapped__
"""As in a process that has not asked yet."""


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    """Let no answer of this process last from one test to another."""
    context.context_bytes_of.cache_clear()
    yield
    context.context_bytes_of.cache_clear()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Give this machine a T4 whose context takes 321 MiB, and the list of the precisions that were trained in."""
    asked: list[list[str]] = []

    def measure(experiments: Sequence[Experiment]) -> int:
        asked.append([experiment.settings.precision for experiment in experiments])  # type: ignore[attr-defined]
        return 321 * MIB

    monkeypatch.setenv("FITPROOF_CACHE", str(own_cache(tmp_path)))
    monkeypatch.setattr(context, "_own_device", lambda card: CPU if card == T4 else None)
    monkeypatch.setattr(context, "environment", lambda device: {"device_name": T4.name, "torch": "2", "driver": "1"})
    monkeypatch.setattr(context, "measure_context", measure)
    return asked


def test_a_context_is_what_two_readings_agree_on(
    measured: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other processes start and end on the card, so that some readings are too large and some too small."""
    readings = [900 * MIB, 20 * MIB, 322 * MIB, 321 * MIB]
    monkeypatch.setattr(context, "measure_context", lambda experiments: readings.pop(0))
    assert context_bytes_of(T4) == 321 * MIB and not readings
    for file in tmp_path.glob("context-*"):
        file.unlink()
    readings += [900 * MIB, 20 * MIB, 322 * MIB, 400 * MIB]
    assert context_bytes_of(T4) == T4_CONTEXT.mib * MIB and not readings
    assert not list(tmp_path.glob("context-*"))


def test_a_context_is_measured_again_after_a_week(
    measured: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert context_bytes_of(T4) == 321 * MIB
    [file] = tmp_path.glob("context-*")
    monkeypatch.setattr(context, "measure_context", lambda experiments: 333 * MIB)
    for days, expected in ((6, 321), (8, 333), (0, 333)):
        then = time.time() - days * 24 * 3600
        if days:
            os.utime(file, (then, then))
        assert context_bytes_of(T4) == expected * MIB


def test_the_context_is_measured_once(measured: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert context_bytes_of(T4) == context_bytes_of(T4) == 321 * MIB
    assert measured == [["fp32", "fp16"]] * 2  # two readings, which agree; a T4 has neither tf32 nor bf16
    monkeypatch.setattr(context, "environment", lambda device: {"device_name": T4.name, "torch": "2", "driver": "2"})
    assert context_bytes_of(T4) == 321 * MIB and len(measured) == 4  # by another driver
    monkeypatch.setattr(context, "SETTINGS", {**context.SETTINGS, "sequence_length": 64})
    assert context_bytes_of(T4) == 321 * MIB and len(measured) == 6  # after another training
    assert context_bytes_of(find_hardware("a100")) == ASSUMED_CONTEXT.mib * MIB and len(measured) == 6


def test_a_context_that_could_not_be_measured_is_not_cached(
    measured: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(context, "measure_context", lambda experiments: None)
    assert context_bytes_of(T4) == T4_CONTEXT.mib * MIB
    assert not list(tmp_path.glob("context-*"))


def test_predictions_and_plans_use_the_measured_context(measured: list[list[str]]) -> None:
    alone, [(_, one_of_many)] = predict(tiny(), T4), predict_each([tiny()], T4)
    for prediction in (alone, one_of_many):
        assert prediction.peak_reserved_bytes is not None
        assert prediction.peak_device_bytes == prediction.peak_reserved_bytes + 321 * MIB
    assert budget_bytes_on(None, None, T4) == T4.memory_bytes - 321 * MIB
    assert len(measured) == 2


def test_the_context_of_another_card_has_the_assumed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_own_device", lambda card: None)
    assert context_bytes_of(T4) == 141 * MIB and context_bytes_of(find_hardware("h200")) == 764 * MIB
    cpu = hardware_of(CPU)
    assert context_bytes_of(cpu) == 0 and budget_bytes_on(None, None, cpu) == cpu.memory_bytes


@pytest.mark.parametrize(
    ("used", "expected"), [((900, 1300), 380), ((None, None), None), ((900, 910), None)], ids=["known", "no", "odd"]
)
def test_reserved_bytes_are_not_part_of_the_context(
    used: tuple[int | None, int | None], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of the clean process is done in this one, which has no training to do."""

    def here(experiment: Experiment, log: Path, observers: Sequence[context._Received], *, work: object) -> Result:
        work(experiment, None, observers[0].message)  # type: ignore[operator]
        return Result(outcome=Outcome.OK, detail=None, steps=(), memory=None, finished=None, seconds_total=1.0)

    readings = iter(used)
    monkeypatch.setattr(context, "used_bytes", lambda device: next(readings))
    monkeypatch.setattr(context, "train", lambda *_: None)
    monkeypatch.setattr(context, "execute", here)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    assert measure_context([tiny()]) == expected


def test_the_clean_process_trains_in_each_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the trainings are the same, and there is no context."""
    monkeypatch.setattr(context, "SETTINGS", {**TINY, "num_steps": 3, "timing_warmup_steps": 2})
    experiments = trainings(CPU, hardware_of(CPU))
    assert [experiment.settings.precision for experiment in experiments] == ["fp32", "fp16", "bf16"]  # type: ignore[attr-defined]
    emitted: list[object] = []
    context._train_all(experiments[:1], experiments[0], experiments[0].prepare(), emitted.append)
    assert emitted == []
    assert measure_context([experiments[0], experiments[2]]) is None


@pytest.mark.gpu
def test_a_real_context_takes_some_hundred_mib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))
    card = hardware_of(torch.device("cuda", 0))
    taken = context_bytes_of(card)
    assert 50 * MIB < taken < 2048 * MIB and taken == context_bytes_of(card)
    assert len(list(tmp_path.glob("context-*"))) == 1
