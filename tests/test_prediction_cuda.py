"""Predictions for CUDA cards: the training's own steps on a simulated card, each in a clean process."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cards import PYTHON, environment_of
from conftest import ROOT, own_cache, tiny

from pipeline.base.errors import InvalidInputError
from pipeline.base.processes import num_cores
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.planning.plan import planned_row
from pipeline.planning.rates import cost_prior
from pipeline.prediction import card_processes
from pipeline.prediction import predict as predict_module
from pipeline.prediction.cards import find_hardware, variables_on
from pipeline.prediction.predict import predict, predict_each
from pipeline.prediction.prediction import Prediction
from pipeline.simulation.cards import ASSUMED_CONTEXT, CARDS
from pipeline.simulation.run import on_cuda_build

A100, H200, T4 = find_hardware("a100"), find_hardware("h200"), find_hardware("t4")
MIB = 2**20
WIDE: dict[str, Any] = {
    "causal_lm__width": 64,
    "causal_lm__num_heads": 4,
    "sequence_length": 64,
    "vocabulary_size": 2048,
}
RECOMPUTED: dict[str, Any] = {"micro_batch_size": 8, "precision": "bf16", "checkpointing": "every_layer", **WIDE}
NANO: dict[str, Any] = {"model": "gpt2-nano", "micro_batch_size": 8, "checkpointing": "every_layer"}
OWN_RUN = """
import json, sys
from pathlib import Path
from simulated_training import train_any_weights
from pipeline.config.experiment import make_experiment
from pipeline.runtime.run import execute
if __name__ == "__main__":
    experiment = make_experiment(json.loads(sys.argv[1]), "main")
    result = execute(experiment, Path(sys.argv[2]), work=train_any_weights)
    assert result.outcome == "ok", result.outcome
    print("peaks", result.memory.peak_allocated_bytes, result.memory.peak_reserved_bytes)
"""


def run_on(card: str, settings: dict[str, Any], folder: Path) -> list[int]:
    """Return the allocated and reserved peaks of a run of `fitproof` on a simulated card."""
    script = folder / "own_run.py"
    script.write_text(OWN_RUN)
    words = [str(PYTHON), str(script), json.dumps({**settings, "device": "cuda:0"}), str(folder / "log")]
    base = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    done = subprocess.run(words, env={**base, **environment_of(card, base=base)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("peaks")]
    return [int(word) for word in line.split()[1:]]


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_size": 4, "effective_batch_size": 8, "precision": "bf16", "checkpointing": "every_layer"},
        pytest.param({"micro_batch_size": 1, "effective_batch_size": 2, "adapter": "qlora"}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "adamw_8bit", "loss_kernel": "chunked"}, marks=pytest.mark.slow),
        pytest.param({"activation_offloading": True, "sequences": "padded"}, marks=pytest.mark.slow),
        pytest.param({"expandable_segments": True, "optimizer": "muon"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_prediction_is_what_a_run_of_its_own_measures(settings: dict[str, Any], tmp_path: Path) -> None:
    values = {"model": "gpt2-nano", "num_steps": 5, "eval_steps": 0, **settings}
    prediction = predict(make_experiment({**values, "device": "cpu"}, "main"), A100)
    assert run_on("a100", values, tmp_path) == [prediction.peak_allocated_bytes, prediction.peak_reserved_bytes]


@pytest.mark.slow
def test_predictions_do_not_depend_on_what_was_predicted_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kinds: list[dict[str, Any]] = [{}, {"precision": "bf16"}, {"checkpointing": "every_layer"}, {"adapter": "lora"}]
    experiments = [tiny(micro_batch_size=size, **WIDE, **kind) for kind in kinds for size in (1, 4, 8)]
    found = []
    for name, order in (("once", experiments), ("again", experiments[::-1])):
        monkeypatch.setenv("FITPROOF_CACHE", str(own_cache(tmp_path / name)))
        made = dict(predict_each(order, H200))
        found.append([made[number] for number in range(len(order))])
    assert found[0] == found[1][::-1]
    assert len({one.peak_allocated_bytes for one in found[0]}) == len(experiments)


def test_each_length_has_work_of_its_own() -> None:
    lengths = [tiny(**{**WIDE, "micro_batch_size": size, "sequence_length": n}) for size in (1, 2) for n in (32, 64)]
    made = dict(predict_each(lengths, H200))
    flops = {number: one.pass_work.flops for number, one in made.items() if isinstance(one, Prediction)}
    assert flops[1] > 1.9 * flops[0] and flops[3] > 1.9 * flops[2], "of 32 and of 64 tokens"


@pytest.mark.skipif(num_cores() < 2, reason="one process runs at a time")
def test_a_call_of_one_thread_does_not_wait_for_that_of_another() -> None:
    processes = card_processes.CardProcesses(Path(on_cuda_build((sys.executable,), may_install=False)[0]))
    variables = {**os.environ, **variables_on(T4)}
    outcomes: list[object] = []

    def sleep() -> None:
        try:
            outcomes.extend(processes.call(time.sleep, [600], [variables]))
        except RuntimeError as error:
            outcomes.append(error)

    sleeping = threading.Thread(target=sleep)
    sleeping.start()
    try:
        assert list(processes.call(abs, [-1, -2], [variables] * 2)) in ([(0, 1), (1, 2)], [(1, 2), (0, 1)])
        assert not outcomes
    finally:
        processes.close()
    sleeping.join(60)
    assert "has ended" in str(*outcomes)


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predict(tiny(**RECOMPUTED), A100)


def test_device_bytes_exceed_reserved_bytes_which_exceed_allocated_bytes(prediction: Prediction) -> None:
    reserved = prediction.peak_reserved_bytes
    assert reserved is not None and prediction.breakdown is not None
    assert reserved >= prediction.peak_allocated_bytes > prediction.breakdown.peak_bytes
    assert reserved % (2 * MIB) == 0
    assert prediction.peak_device_bytes == reserved + ASSUMED_CONTEXT.mib * MIB
    assert prediction.smallest_budget_bytes == reserved


@pytest.mark.parametrize("largest", [8, 16])
def test_work_is_that_of_the_micro_batch_whether_it_is_counted_or_between_two(
    largest: int, prediction: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of 4 sequences is linear between 1 and 8, and counted by itself where 16 are not predicted."""
    real, counted = predict_module.predict_on_card, set[int]()

    def without_16(experiments: Sequence[Experiment], *args: Any, **options: Any) -> Iterator[tuple[int, object]]:
        counted.update(one.micro_batch_size for one in experiments if options["is_recorded"])
        for number, outcome in real(experiments, *args, **options):
            refused = experiments[number].micro_batch_size == 16
            yield number, InvalidInputError("not predicted") if refused else outcome

    monkeypatch.setattr(predict_module, "predict_on_card", without_16)
    sizes = (1, 4, largest)
    experiments = [tiny(**{**RECOMPUTED, "micro_batch_size": size, "effective_batch_size": 16}) for size in sizes]
    found = dict(predict_each(experiments, A100))
    middle = found[1]
    assert isinstance(middle, Prediction) and counted == ({1, 8} if largest == 8 else {1, 4, 16})
    assert middle.pass_work.flops == pytest.approx(prediction.pass_work.flops * 4 / prediction.micro_batch_size)


def test_workspaces_of_cublas_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread that calls cuBLAS has one: that of the forward pass, and autograd's of the backward pass."""
    peaks = []
    for value in (":0:0", ":4096:8"):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
        peaks.append(predict(tiny(**WIDE), H200).peak_allocated_bytes)
    assert peaks[1] - peaks[0] == 2 * 8 * 4096 * 1024


@pytest.mark.slow
def test_a_budget_between_allocated_and_reserved_bytes_is_tried(prediction: Prediction, tmp_path: Path) -> None:
    """Cached memory is released at the cap: a run within the smallest budget fits, one within two MiB less does not."""
    values = {**NANO, "micro_batch_size": 16, "effective_batch_size": 16, "num_steps": 3, "eval_steps": 0}
    experiment = make_experiment({**values, "device": "cpu"}, "main")
    plain = predict(experiment, A100)
    assert plain.peak_reserved_bytes is not None
    budget = plain.peak_reserved_bytes - 2 * MIB
    capped = predict(experiment, A100, budget_bytes=budget)
    assert plain.peak_allocated_bytes <= capped.smallest_budget_bytes <= budget
    assert capped.peak_reserved_bytes == plain.peak_reserved_bytes
    assert capped.fits(capped.smallest_budget_bytes) and not capped.fits(capped.peak_allocated_bytes - 1)
    row = planned_row({}, experiment, capped, budget, cost_prior(A100))
    assert row.fits and row.peak_reserved_bytes == capped.smallest_budget_bytes
    caps = [f"{(capped.smallest_budget_bytes - less) // MIB}MiB" for less in (0, 2 * MIB)]
    _, reserved = run_on("a100", {**values, "budget": caps[0]}, tmp_path)
    assert reserved == capped.smallest_budget_bytes
    with pytest.raises(AssertionError, match="out_of_memory"):
        run_on("a100", {**values, "budget": caps[1]}, tmp_path)
    assert prediction.peak_within(prediction.peak_allocated_bytes - 1) is None


def test_expandable_segments_follow_the_environment_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, grown = (
        make_experiment({**NANO, "device": "cpu", "expandable_segments": grows}, "main") for grows in (False, True)
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    expandable = predict(plain, A100)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert expandable.peak_reserved_bytes != predict(plain, A100).peak_reserved_bytes
    assert predict(grown, A100) == expandable


def test_memory_of_gpt2_that_was_measured_by_other_means_before() -> None:
    """MiB allocated at micro-batch 8 x 1024 in bf16, with dropout; fake tensors gave these to 1 %."""
    expected = {("gpt2", "none"): 12_703, ("gpt2", "every_layer"): 6_614, ("gpt2-medium", "every_layer"): 9_759}
    for (model, checkpointing), mib in expected.items():
        settings = {"device": "cpu", "model": model, "sequence_length": 1024, "precision": "bf16"}
        found = predict(make_experiment({**settings, "checkpointing": checkpointing}, "main"), H200)
        assert found.peak_allocated_bytes / MIB == pytest.approx(mib, rel=0.01)
        assert found.breakdown is not None
        shares = found.breakdown.category_bytes
        assert shares["optimizer state"] == pytest.approx(2 * shares["parameters"], rel=0.001)
        assert found.breakdown.largest[0].shape[-1] == 50257 and found.breakdown.phase == "backward"


def test_what_a_card_cannot_do_or_a_simulation_cannot_know_is_said(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("bf16", "tf32"):
        with pytest.raises(InvalidInputError, match=f"{precision} needs compute capability 8.0.*Tesla T4 is older"):
            predict(tiny(precision=precision), T4)
    with pytest.raises(InvalidInputError, match="no card is called 'h300'; the closest are h200"):
        find_hardware("h300")
    assert len(CARDS) >= 12
    code.write_text(
        """
from torch import nn
class Reads(nn.Module):
    def forward(self, inputs):
        return self.inner(inputs) if inputs.abs().mean() < 1e9 else inputs
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)
class Own(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding, self.head = nn.Embedding(size, 32), nn.Linear(32, size)
        self.layers = nn.ModuleList(Reads() for _ in range(2))
    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)
def build(vocabulary_size):
    return Own(vocabulary_size)
"""
    )
    experiments = [
        tiny(model="own_code:build"),
        tiny(precision="tf32"),
    ]
    (_, refused), (_, unread) = sorted(predict_each(experiments[::-1], T4), key=lambda pair: pair[0])
    assert "compute capability" in str(refused)
    assert isinstance(unread, InvalidInputError) and "own_code.py:5 reads a value" in str(unread)


@pytest.mark.slow
def test_the_end_of_the_host_is_an_error_and_not_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    started = card_processes.CardProcesses(Path(on_cuda_build((sys.executable,), may_install=False)[0]))
    monkeypatch.setattr("pipeline.prediction.predict.card_processes", lambda: started)
    assert predict(tiny(**WIDE), T4).peak_reserved_bytes
    started._process.kill()
    with pytest.raises(RuntimeError, match="the process on a simulated card has ended"):
        predict(tiny(**WIDE, micro_batch_size=2), T4)
    started.close()


@pytest.mark.slow
def test_predicting_the_largest_models_takes_little_memory() -> None:
    code = """
import resource
from pipeline.config.experiment import make_experiment
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
for model in ("gpt2-xl", "llama-7b"):
    values = {"device": "cpu", "model": model, "sequence_length": 1024, "micro_batch_size": 4, "precision": "bf16"}
    print(predict(make_experiment(values, "main"), find_hardware("h200")).breakdown.category_bytes["parameters"] // 4)
from pipeline.prediction.card_processes import card_processes
card_processes().close()
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    xl, seven_billion, used_kib = map(int, done.stdout.split())
    assert xl == pytest.approx(1.56e9, rel=0.01) and seven_billion == pytest.approx(6.74e9, rel=0.01)
    assert used_kib < 2 * 2**20
