"""The peers have the bare loop's losses, or a known reason for others; no run is measured twice."""

import csv
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from conftest import ROOT, tiny
from torch import Tensor

from pipeline.base.errors import InvalidInputError

SCRIPT = ROOT / "benchmarks" / "peers.py"
SHORT = ["--device", "cpu", "--tiny", "--num_steps", "4"]
OF_LIBRARIES = [
    "ignore:.*isinstance.treespec, LeafSpec.:FutureWarning",  # lightning's use of torch
    "ignore:.*does not have many workers",  # lightning's advice
]


@pytest.fixture
def peer_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("peer_run")
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate has one for the whole process


def losses(peer_run: ModuleType, peer: str, **settings: Any) -> tuple[float, ...]:
    """Return those of each step, with the clock and the meter checked on the way."""
    experiment = tiny(eval_steps=0, **settings)
    extrapolated: list[Any] = []
    peer_run.measure(peer, experiment, experiment.prepare(), extrapolated.append)
    measured = extrapolated[-1]
    assert len(measured.losses) == len(measured.seconds) + 1 == experiment.settings.num_steps
    assert min(measured.seconds) > 0
    [peak] = {message.peak_allocated_bytes for message in extrapolated if hasattr(message, "peak_allocated_bytes")} - {
        None
    }
    assert peak > 0
    return tuple(measured.losses)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "fp32": {"micro_batch_size": 4},
    "bf16": {"precision": "bf16", "micro_batch_size": 2, "accumulation_steps": 2, "checkpointing": "every_layer"},
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("peer", ["Fitproof", "Accelerate", "Lightning"])
@pytest.mark.filterwarnings(*OF_LIBRARIES)
def test_a_peer_takes_the_same_steps_as_the_bare_loop(peer: str, configuration: str, peer_run: ModuleType) -> None:
    settings = CONFIGURATIONS[configuration]
    assert losses(peer_run, peer, **settings) == pytest.approx(losses(peer_run, "bare loop", **settings), abs=1e-5)


@pytest.fixture
def padded(short_documents: Path) -> dict[str, Any]:
    """Give settings under which the forward passes of one step have very different numbers of targets."""
    text = {"corpus": "text_files", "text_files__path": str(short_documents), "sequences": "padded"}
    return {**text, "micro_batch_size": 2, "accumulation_steps": 2}


@pytest.mark.parametrize("peer", ["Fitproof", "Accelerate"])
@pytest.mark.filterwarnings(*OF_LIBRARIES)
def test_a_peer_divides_by_the_targets_of_the_whole_step(
    peer: str, padded: dict[str, Any], peer_run: ModuleType
) -> None:
    assert losses(peer_run, peer, **padded) == pytest.approx(losses(peer_run, "bare loop", **padded), abs=1e-5)


@pytest.mark.filterwarnings(*OF_LIBRARIES)
def test_lightning_takes_the_mean_of_the_forward_passes_means(
    padded: dict[str, Any], peer_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_lightning = losses(peer_run, "Lightning", **padded)
    assert of_lightning != pytest.approx(losses(peer_run, "bare loop", **padded), abs=1e-3)
    bare, over_targets = peer_run.bare, peer_run.bare.loss_of

    def over_passes(module: Any, batch: dict[str, Tensor], num_targets: int) -> Tensor:
        loss: Tensor = over_targets(module, batch, bare.targets_in(batch)) / padded["accumulation_steps"]
        return loss

    monkeypatch.setattr(bare, "loss_of", over_passes)
    assert of_lightning == pytest.approx(losses(peer_run, "bare loop", **padded), abs=1e-5)


@pytest.mark.filterwarnings(*OF_LIBRARIES)
def test_trainer_counts_what_it_divides_by_itself(
    padded: dict[str, Any], peer_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some versions count the first label of each row of a GPT-2, which is no target, and some do not."""
    of_trainer = losses(peer_run, "Trainer", **padded)
    counts: list[Callable[[dict[str, Tensor]], int]] = [
        peer_run.bare.targets_in,
        lambda batch: int((batch["labels"] != -100).sum()),
    ]
    of_bare_loops = []
    for count in counts:
        monkeypatch.setattr(peer_run.bare, "targets_in", count)
        of_bare_loops.append(losses(peer_run, "bare loop", **padded))
    assert any(of_trainer == pytest.approx(expected, abs=1e-5) for expected in of_bare_loops)


def rows_of(folder: Path) -> list[dict[str, str]]:
    [file] = folder.glob("peers_tiny_cpu_*.csv")
    return list(csv.DictReader(file.read_text().splitlines()))


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on_where_it_stopped(tmp_path: Path) -> None:
    words = [sys.executable, SCRIPT, *SHORT, "--configurations", "fp32", "--peers", "Fitproof", "--runs", "2"]
    words += ["--folder", tmp_path, "--date", "2026-01-02"]
    file = tmp_path / "peers_tiny_cpu_2026-01-02.csv"
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while process.poll() is None and not (file.exists() and file.read_text().count("\n") > 1):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert "the same command goes on" in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    before = file.read_text()
    file.write_text(before + "gpt2-nano,fp32,2,Headr")  # as a power cut would leave it
    subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert 1 < before.count("\n") < 5
    assert file.read_text().startswith(before)
    assert sorted((row["round"], row["peer"]) for row in rows_of(tmp_path)) == [
        (number, peer) for number in "01" for peer in ("Fitproof", "bare loop")
    ]
    assert {row["outcome"] for row in rows_of(tmp_path)} == {"ok"}


def test_runs_under_other_conditions_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    journal = importlib.import_module("journal").Journal
    file, run = tmp_path / "runs.csv", {"model": "gpt2", "configuration": "fp32", "round": 0}
    subject, columns = ("model", "configuration"), ("model", "configuration", "round")
    journal.open(file, columns, subject, {"gpt2 fp32": "torch 2.13"}).add(run)
    [row] = journal.open(file, columns, subject, {"gpt2 fp32": "torch 2.13", "gpt2 padded": "torch 2.14"}).rows()
    assert {name: row[name] for name in run} == {name: str(value) for name, value in run.items()}
    with pytest.raises(InvalidInputError, match="had other settings, versions or hardware; move that file away"):
        journal.open(file, columns, subject, {"gpt2 fp32": "torch 2.14"})


BAD = [
    (["--device", "cuda:7"], "device cuda:7 needs a CUDA GPU, and this machine has"),
    (["--peers", "Trainer,Keras"], "no peer is called 'Keras'; the peers are Fitproof, bare loop, Trainer, Accelerate"),
    (["--configurations", "fp8"], "no configuration is called 'fp8'; the configurations are fp32, bf16_checkpointed"),
    (["--models", "gpt5"], "no model is called 'gpt5'; the models are"),
    (["--runs", "0"], "runs must be 1 or more, and is 0; leave it out"),
    (["--folder", "/proc/results"], "the results folder must be writable, and /proc/results is not"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_answered_before_anything_runs(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    assert importlib.import_module("peers").main([*SHORT, *words]) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and message in error


@pytest.mark.slow
def test_a_comparison_goes_on_after_its_time_was_over(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FITPROOF_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, SCRIPT, *SHORT, "--runs", "1", "--folder", tmp_path]
    begun = subprocess.run([*command, "--minutes", "1e-9"], env=environment, capture_output=True, text=True)
    assert begun.returncode == 75 and "goes on with what is left (15)" in begun.stderr
    subprocess.run(command, env=environment, check=True)
    rows = rows_of(tmp_path)
    assert len(rows) == 3 * 5
    assert {row["outcome"] for row in rows} == {"ok"}
    [page] = tmp_path.glob("*.md")
    text = page.read_text()
    assert text.count("Fitproof agrees within") == text.count("Accelerate agrees within") == 3
    assert "no other divisor" not in text
    [image] = tmp_path.glob("*.png")
    assert image.read_bytes().startswith(b"\x89PNG")
