"""Evaluation and saving need no more memory than the training that they follow."""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny, with_corpus_of
from levers import ON_CPU, ON_CUDA, Lever, needs_package
from test_levers import DROPOUT, ON_CARD
from trainings import loop_of

from pipeline.base.results import MemoryUse, Outcome
from pipeline.config.experiment import Experiment
from pipeline.config.settings import TECHNIQUES
from pipeline.data._support.sequences import DynamicallyPaddedSequences
from pipeline.memory.meter import WATCHED_STEPS, CpuMeter
from pipeline.runtime.run import execute
from pipeline.training.loop import Loop
from pipeline.training.metrics import summarize
from pipeline.training.step import build_step, evaluate
from pipeline.training.typical_step import evaluation_note

SMALLEST_TRAINING: dict[str, Any] = {"micro_batch_size": 1, "accumulation_steps": 1, "checkpointing": "every_layer"}
"""Keeps the fewest activations, so that its peak is the closest to that of an evaluation."""
OF_TWO_LENGTHS = """
import numpy as np
from pipeline.base.contracts import Prepared
from pipeline.data._support.sequences import PackedSequences, TokenStore

def read(request):
    def sequences(length):
        return PackedSequences(TokenStore(np.arange(20 * length) % 7, np.array([0, 20 * length])), length)
    return Prepared(train=sequences(32), held_out=sequences({held_out}), vocabulary_size=7, source="own", digest="own")
"""
SEVERAL_PASSES: dict[str, Any] = {"micro_batch_size": 2, "accumulation_steps": 4}
each_that_runs_on_a_cpu, each_that_runs_on_a_card = (
    pytest.mark.parametrize("lever", [one for one in levers if one.predicted], ids=lambda lever: lever.name)
    for levers in (ON_CPU, ON_CUDA)
)


def cut(lever: Lever, **settings: Any) -> dict[str, Any]:
    """Return these settings with those of a lever, whose own come first."""
    accumulation = {} if lever.accumulates else {"accumulation_steps": 1}
    return {**settings, **lever.companions, **lever.settings, **accumulation}


def peaks_on_cpu(experiment: Experiment) -> tuple[int, int]:
    """Return the allocator's peaks of the first two steps and of the evaluation after them.

    The second is that of an evaluation with the last step's batch still in memory.
    """
    prepared = experiment.prepare()
    gc.collect()  # what an earlier test left must not be freed while a meter counts
    meter = CpuMeter()
    step = build_step(experiment, prepared)
    optimizer = step.make_optimizer(step.trainable.module)
    loop = Loop(experiment, prepared.train, step, optimizer, lambda record: None)
    with step.run_context():
        loop.advance(WATCHED_STEPS, meter.mark)
        meter.stop()
        of_training = meter.read()
        assert of_training.peak_allocated_bytes is not None
        gc.collect()
        beyond = CpuMeter()
        evaluate(step, prepared.held_out, eval_steps=2)
        beyond.stop()
    kept, more = of_training.phases[-1], beyond.read().peak_allocated_bytes
    assert kept.phase == "optimizer" and more
    return of_training.peak_allocated_bytes, kept.allocated_bytes + more


@pytest.mark.matrix(2)
@each_that_runs_on_a_cpu
def test_the_peak_of_an_evaluation_is_below_that_of_the_training(lever: Lever) -> None:
    needs_package(lever)
    settings = {**with_corpus_of(lever.models[0]), "sequence_length": 64, **DROPOUT, **cut(lever, **SMALLEST_TRAINING)}
    of_training, of_evaluation = peaks_on_cpu(tiny(**settings))
    assert 0 < of_evaluation < of_training


@pytest.mark.gpu
@pytest.mark.matrix(2)
@each_that_runs_on_a_card
def test_an_evaluation_raises_no_peak_on_a_card(lever: Lever, card: Any) -> None:
    """Neither of the allocated bytes nor of the reserved ones, though what the allocator has cached is divided anew."""
    needs_package(lever)
    settings = {**ON_CARD, **cut(lever, **SMALLEST_TRAINING)}
    without, evaluated = (card.ask(kind="measure", settings={**settings, "eval_steps": count}) for count in (0, 2))
    assert without["outcome"] == "ok"
    assert evaluated == without


@pytest.fixture(scope="session")
def long_held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give documents of 8 words, of which the held-out ones have 60."""
    file = tmp_path_factory.mktemp("text") / "long.jsonl"
    texts = ["one two three four five six seven eight " * (8 if number % 10 == 5 else 1) for number in range(300)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.mark.parametrize("sequences", ["padded", "grouped"])
def test_the_first_steps_are_as_long_as_the_longest_document_that_is_evaluated(
    sequences: str, long_held_out: Path
) -> None:
    settings = {"corpus": "text_files", "text_files__path": long_held_out, "sequence_length": 200}
    settings |= {"sequences": sequences, **SEVERAL_PASSES}
    evaluated, not_evaluated = (tiny(**settings, eval_steps=count) for count in (1, 0))
    prepared, train = evaluated.prepare(), not_evaluated.prepare().train
    assert isinstance(train, DynamicallyPaddedSequences) and isinstance(prepared.train, DynamicallyPaddedSequences)
    assert isinstance(prepared.held_out, DynamicallyPaddedSequences)
    longest = max(prepared.held_out.lengths)
    assert train.padded_length == max(train.lengths) < longest == prepared.train.padded_length
    assert prepared.train.batch([0])["labels"].shape[1] == longest
    assert prepared.train.micro_batches([0], 1)[0]["labels"].shape[1] <= train.padded_length
    of_training, of_evaluation = peaks_on_cpu(evaluated)
    too_small, same_evaluation = peaks_on_cpu(not_evaluated)
    assert of_evaluation < of_training
    assert too_small < same_evaluation <= of_evaluation


@pytest.mark.gpu
def test_the_peak_of_an_evaluation_is_measured_on_a_card(tmp_path: Path) -> None:
    result = execute(tiny(device="cuda:0", num_steps=4, causal_lm__width=256, eval_steps=1), tmp_path / "log")
    memory = result.memory
    assert result.outcome is Outcome.OK and isinstance(memory, MemoryUse) and memory.peak_allocated_bytes is not None
    kept = next(one for one in memory.phases if (one.step, one.phase) == (1, "optimizer")).allocated_bytes
    assert memory.peak_evaluation_bytes is not None
    assert kept < memory.peak_evaluation_bytes < memory.peak_allocated_bytes
    assert summarize(result, 8, 3)["peak_evaluation_mib"] == memory.peak_evaluation_bytes / 2**20


def added(save: Callable[[], Any]) -> tuple[int, int]:
    """Return by how much the allocated and the reserved peak exceed what a card holds before `save` is called."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    kept = save()
    after = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    del kept
    return after[0] - before[0], after[1] - before[1]


SAVED: list[dict[str, Any]] = [
    {"model": "gpt2-nano"},
    {"model": "llama-nano", "weights": "bfloat16"},
    {"model": "qwen3-nano", "adapter": "lora"},
    *({"optimizer": name} for name in sorted(TECHNIQUES["optimizer"].values_to_try("optimizer", None))),  # type: ignore[arg-type]
]


@pytest.mark.matrix(2)
@pytest.mark.gpu
@pytest.mark.parametrize("settings", SAVED, ids=str)
def test_saving_takes_no_memory_of_a_card(settings: dict[str, Any], tmp_path: Path) -> None:
    """A state dictionary refers to the tensors that are trained, and they are written from copies on the host."""
    import peft

    experiment = tiny(device="cuda:0", **settings)
    step, loop = loop_of(experiment)
    module, optimizer = step.trainable.module, loop.optimizer
    for _ in range(WATCHED_STEPS):
        loop.launch()
    ways: dict[str, Callable[[], Any]] = {
        "state_dict": module.state_dict,
        "optimizer": optimizer.state_dict,
        "torch.save": lambda: torch.save([module.state_dict(), optimizer.state_dict()], tmp_path / "all.pt"),
        "save_pretrained": lambda: module.save_pretrained(tmp_path / "model"),
    }
    if "adapter" in settings:
        ways["adapter"] = lambda: torch.save(peft.get_peft_model_state_dict(module), tmp_path / "adapter.pt")
    assert {name: added(save) for name, save in ways.items()} == dict.fromkeys(ways, (0, 0))
    assert (tmp_path / "all.pt").stat().st_size > sum(parameter.nbytes for parameter in module.parameters())


@pytest.mark.parametrize(("held_out", "is_said"), [(48, True), (32, False)])
def test_longer_held_out_sequences_of_a_corpus_of_ones_own_are_said(
    held_out: int, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot be padded to: only the corpus knows how."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_lengths", raising=False)
    (tmp_path / "own_lengths.py").write_text(OF_TWO_LENGTHS.format(held_out=held_out))
    experiment = tiny(corpus="own_lengths:read", eval_steps=1)
    note = evaluation_note(experiment)
    assert (note is not None and "holds out sequences of 48 tokens and trains on 32" in note) is is_said
    assert evaluation_note(tiny(corpus="own_lengths:read", eval_steps=0)) is None
    monkeypatch.delitem(sys.modules, "own_lengths")
