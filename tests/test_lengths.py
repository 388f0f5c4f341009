"""Micro-batches of different lengths: the same training, and the longest micro-batch that can be drawn comes first."""

import gc
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, pairs, tiny
from hypothesis import given
from hypothesis import strategies as st
from test_prediction import CPU
from trainings import check_same, loop_of, steps_and_peak

from pipeline.base.contracts import Batch, Sequences
from pipeline.base.results import Outcome, Result, StepRecord
from pipeline.base.units import MIB
from pipeline.config.given import merged, nested
from pipeline.data._support.sequences import (
    IGNORED_LABEL,
    DynamicallyPaddedSequences,
    PaddedSequences,
    TokenStore,
    make_sequences,
)
from pipeline.memory.device import hardware_of
from pipeline.memory.meter import WATCHED_STEPS, CpuMeter
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.report.comparable import incomparable
from pipeline.runtime.run import execute, measured_summary
from pipeline.searching.experiment_problem import make_experiment_problem
from pipeline.training.loop import rows_of_step
from pipeline.training.metrics import Row, step_metrics, summarize
from pipeline.training.typical_step import typical_step

LENGTH = 24
"""The longest sequence of the drawn corpora."""
SPLITS = st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1)])
"""Micro-batch sizes and accumulation steps."""


@st.composite
def stores(draw: st.DrawFn) -> TokenStore:
    """Draw documents of 2 to 40 tokens, without a zero among them, of some of which some tokens are no targets."""
    lengths = draw(st.lists(st.integers(2, 40), min_size=8, max_size=20))
    offsets = np.cumsum([0, *lengths])
    is_target = None
    if draw(st.booleans()):
        is_target = np.array(draw(st.lists(st.booleans(), min_size=int(offsets[-1]), max_size=int(offsets[-1]))))
        is_target[offsets[:-1] + 1] = True  # no document is left out
    return TokenStore(np.arange(1, offsets[-1] + 1, dtype=np.int32), offsets, is_target)


def contents(sequences: Sequences, batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the tokens and labels of each sequence of a batch without its padding."""
    rows = zip(batch["input_ids"], batch["labels"], strict=True)
    lengths = [(ids, labels, int((labels != IGNORED_LABEL).nonzero().max()) + 1) for ids, labels in rows]
    assert sum(length for *_, length in lengths) == sequences.count(batch)[0]
    assert all(not ids[length:].any() for ids, _, length in lengths)
    return [(tuple(ids[:length].tolist()), tuple(labels[:length].tolist())) for ids, labels, length in lengths]


@pytest.mark.parametrize("kind", ["padded", "grouped"])
@given(store=stores(), split=SPLITS, data=st.data())
def test_every_sequence_of_a_step_is_in_one_micro_batch_that_is_as_long_as_its_longest(
    kind: Any, store: TokenStore, split: tuple[int, int], data: st.DataObject
) -> None:
    size, num_passes = split
    sequences, fixed = make_sequences(kind, store, LENGTH), make_sequences("fixed_length", store, LENGTH)
    rows = data.draw(st.permutations(range(len(sequences))))[: size * num_passes]
    batches = sequences.micro_batches(rows, size)
    found = [contents(sequences, batch) for batch in batches]
    assert [len(batch) for batch in found] == [size] * num_passes
    wanted = contents(fixed, fixed.batch(rows))
    assert sorted(itertools.chain(*found)) == sorted(wanted)
    assert [batch["labels"].shape[1] for batch in batches] == [max(len(ids) for ids, _ in part) for part in found]
    for batch in batches:
        assert sequences.num_positions(batch) == batch["labels"].numel()
    if kind == "padded":
        assert list(itertools.chain(*found)) == wanted
    else:
        lengths = [len(ids) for part in found for ids, _ in part]
        assert lengths == sorted(lengths, reverse=True)


@given(store=stores(), split=SPLITS)
def test_grouping_never_adds_padding_and_a_whole_batch_is_as_long_as_the_longest(
    store: TokenStore, split: tuple[int, int]
) -> None:
    size, num_passes = split
    rows = range(size * num_passes)
    fixed, padded, grouped = (make_sequences(kind, store, LENGTH) for kind in ("fixed_length", "padded", "grouped"))
    assert isinstance(padded, PaddedSequences)
    num_positions = [sum(map(each.num_positions, each.micro_batches(rows, size))) for each in (grouped, padded, fixed)]
    assert num_positions == sorted(num_positions)
    assert padded.batch([0])["labels"].shape[1] == max(padded.lengths) <= LENGTH
    assert fixed.batch([0])["labels"].shape[1] == LENGTH


@pytest.fixture
def documents(short_documents: Path) -> dict[str, Any]:
    """Give the settings of a corpus whose longest document is shorter than a sequence may be."""
    return {"corpus": "text_files", "text_files__path": short_documents, "sequence_length": 200, "num_steps": 8}


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("model", "more"),
    pairs(["gpt2-nano", "llama-nano"], [{}, {"checkpointing": "every_layer"}, {"attention": "eager"}]),
)
def test_losses_are_those_of_padding_to_the_sequence_length(
    model: str, more: dict[str, Any], documents: dict[str, Any]
) -> None:
    shared = {**documents, **more, "model": model, "num_steps": 4}
    wanted, _ = steps_and_peak(tiny(**shared, sequences="fixed_length", micro_batch_size=8))
    for sequences, size, num_passes in (("padded", 8, 1), ("grouped", 2, 4)):
        steps, _ = steps_and_peak(
            tiny(**shared, sequences=sequences, micro_batch_size=size, accumulation_steps=num_passes)
        )
        check_same(steps, wanted)
        assert all(same.positions < one.positions for one, same in zip(wanted, steps, strict=True))


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("model", "more"),
    pairs(
        ["gpt2-nano", "llama-nano"],
        [
            {},
            {"attention": "eager"},
            {"checkpointing": "every_layer"},
            {"attention": "eager", "checkpointing": "every_layer"},
        ],
    ),
)
@pytest.mark.parametrize("sequences", ["padded", "grouped"])
def test_the_predicted_peak_is_the_measured_one(
    sequences: str, model: str, more: dict[str, Any], documents: dict[str, Any]
) -> None:
    own = {"model": model, "sequences": sequences, "micro_batch_size": 2, "accumulation_steps": 3, "eval_steps": 0}
    experiment = tiny(**documents, **own, **more)
    steps, peak = steps_and_peak(experiment)
    assert predict(experiment, CPU).peak_allocated_bytes == pytest.approx(peak, rel=1e-4)
    train_data = experiment.prepare().train
    assert isinstance(train_data, DynamicallyPaddedSequences)
    assert [one.positions for one in steps[:WATCHED_STEPS]] == [6 * max(train_data.lengths)] * WATCHED_STEPS
    assert max(one.positions for one in steps[WATCHED_STEPS:]) < steps[0].positions


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("sequences", "attention"), pairs(["padded", "grouped"], ["sdpa", "eager"]))
def test_no_step_of_an_epoch_needs_more_than_the_first_two(
    sequences: str, attention: str, documents: dict[str, Any]
) -> None:
    """A new meter for each part of the run: each counts from the memory that the part begins with."""
    cut = {"sequences": sequences, "micro_batch_size": 2, "accumulation_steps": 2}
    experiment = tiny(**documents, **cut, attention=attention)
    num_steps = len(experiment.prepare().train) // experiment.effective_batch_size
    _, loop = loop_of(experiment)
    peaks = []
    for part in (1, 1, num_steps - WATCHED_STEPS):
        gc.collect()
        meter = CpuMeter()
        loop.advance(part)
        meter.stop()
        peaks.append(meter.read().peak_allocated_bytes or 0)
    assert 0 < peaks[2] <= peaks[1]


def test_the_share_of_padding_is_that_of_the_typical_steps(documents: dict[str, Any]) -> None:
    experiment = tiny(**documents, sequences="padded", micro_batch_size=2, accumulation_steps=2)
    steps, _ = steps_and_peak(experiment)
    metrics, typical = summarize(finished(steps), 4, timing_warmup_steps=3, tokens_per_position=0.8), steps[3:]
    num_tokens, num_positions = sum(one.tokens for one in typical), sum(one.positions for one in typical)
    assert metrics["padding_percent"] == pytest.approx(100 * (1 - num_tokens / num_positions))
    seconds_per_position = float(np.median([one.seconds / one.positions for one in typical]))
    assert metrics["tokens_per_second"] == pytest.approx(0.8 / seconds_per_position)
    assert metrics["tokens_processed"] == sum(one.positions for one in steps) > metrics["tokens_seen"]
    assert step_metrics(steps[0])["padding_percent"] > metrics["padding_percent"] > 0


@pytest.mark.matrix(2)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("sequences", ["padded", "grouped"])
def test_the_speed_of_a_trial_does_not_depend_on_the_lengths_of_its_steps(
    sequences: str, size: int, documents: dict[str, Any]
) -> None:
    cut = {"sequences": sequences, "micro_batch_size": size, "accumulation_steps": 4 // size, "num_steps": 8}
    experiment = tiny(**{**documents, **cut})
    steps, _ = steps_and_peak(experiment)
    timed = [replace(one, seconds=one.positions / 1000) for one in steps]
    assert len({one.seconds for one in timed}) > 2
    speeds = [measured_summary(experiment, finished(timed[:num])).metrics["tokens_per_second"] for num in (5, 6, 8)]
    typical = typical_step(experiment, experiment.prepare())
    assert speeds == [pytest.approx(1000 * typical.tokens_per_position)] * 3


def test_packed_sequences_have_no_metrics_of_padding() -> None:
    steps, _ = steps_and_peak(tiny())
    metrics = {*summarize(finished(steps), 8, timing_warmup_steps=3), *step_metrics(steps[0])}
    assert "tokens_seen" in metrics and not {"padding_percent", "tokens_processed"} & metrics


def finished(steps: list[StepRecord]) -> Result:
    """Return the result of a run that took these steps."""
    return Result(outcome=Outcome.OK, steps=tuple(steps), seconds_total=1.0)


@pytest.mark.parametrize("sequences", ["fixed_length", "padded", "grouped"])
def test_the_typical_step_is_the_mean_of_those_that_are_taken(sequences: str, documents: dict[str, Any]) -> None:
    experiment = tiny(**documents, sequences=sequences, micro_batch_size=2, accumulation_steps=4)
    prepared = experiment.prepare()
    steps, _ = steps_and_peak(experiment)
    typical = typical_step(experiment, prepared)
    taken = steps[WATCHED_STEPS:]
    assert typical.share == pytest.approx(np.mean([one.positions for one in taken]) / steps[0].positions)
    if sequences == "fixed_length":
        assert typical.share == typical.square_share == 1
        assert isinstance(prepared.train, PaddedSequences)
        assert typical.num_tokens == pytest.approx(8 * prepared.train.lengths.mean())
    else:
        assert typical.num_tokens == pytest.approx(np.mean([one.tokens for one in taken]))
        assert typical.share**2 < typical.square_share < typical.share


def test_the_work_of_a_typical_step_is_less(documents: dict[str, Any]) -> None:
    fixed, padded, grouped = (
        predict(tiny(**documents, sequences=kind, micro_batch_size=2, accumulation_steps=4), CPU)
        for kind in ("fixed_length", "padded", "grouped")
    )
    assert padded.num_tokens == grouped.num_tokens
    assert grouped.pass_work.flops < padded.pass_work.flops < fixed.pass_work.flops
    assert grouped.pass_work.num_kernels == padded.pass_work.num_kernels == fixed.pass_work.num_kernels
    assert grouped.peak_bytes == padded.peak_bytes < fixed.peak_bytes
    assert grouped.update_work == fixed.update_work


def test_a_loss_in_chunks_counts_the_tokens_of_the_longest_micro_batch(documents: dict[str, Any]) -> None:
    """Sequences may be of 200 tokens, and none is: the number of chunks follows from what there is."""
    experiment = tiny(**documents, sequences="padded", loss_kernel="chunked", loss_chunk_tokens=256, micro_batch_size=4)
    _, peak = steps_and_peak(experiment)
    for size in (2, 4, 8):
        predict(tiny(**documents, sequences="padded", loss_kernel="chunked", micro_batch_size=size), CPU)
    assert predict(experiment, CPU).peak_allocated_bytes == pytest.approx(peak, rel=1e-4)


@pytest.mark.gpu
def test_a_longest_micro_batch_that_does_not_fit_ends_the_run_at_once(
    documents: dict[str, Any], tmp_path: Path
) -> None:
    """The sequences of the first two steps are shorter: without the padding they would fit."""
    lines = documents["text_files__path"].read_text().splitlines()
    middle = len(lines) // 2
    lines[middle] = json.dumps({"text": " ".join(["da"] * 150)})
    file = tmp_path / "one_long.jsonl"
    file.write_text("\n".join(lines))
    large = {
        **documents,
        "text_files__path": file,
        "device": "cuda:0",
        "causal_lm__vocabulary_size": 32768,
        "eval_steps": 0,
    }
    large |= {"sequences": "padded", "micro_batch_size": 4}
    sequences = tiny(**large).prepare().train
    assert isinstance(sequences, DynamicallyPaddedSequences)
    first = [rows_of_step(len(sequences), number, 4, seed=0) for number in range(WATCHED_STEPS)]
    cut = {**large, "sequence_length": int(sequences.lengths[first].max())}
    card = hardware_of(tiny(**large).device)
    of_short, of_long = (predict(tiny(**each), card) for each in (cut, large))
    assert of_short.peak_bytes < of_long.peak_allocated_bytes
    budget = f"{(of_short.peak_bytes + of_long.peak_allocated_bytes) // (2 * MIB)}MiB"
    short, long = (tiny(**each, budget=budget) for each in (cut, large))
    assert execute(short, tmp_path / "short.txt").outcome is Outcome.OK
    result = execute(long, tmp_path / "long.txt")
    assert result.outcome is Outcome.OUT_OF_MEMORY and len(result.steps) < WATCHED_STEPS


def test_a_plan_and_a_search_say_what_peaks_and_times_are_of(documents: dict[str, Any]) -> None:
    settings = merged(TINY, nested({name.replace("__", "."): value for name, value in documents.items()}))
    space = {"micro_batch_size": [2], "sequences": ["fixed_length", "padded", "grouped"]}
    problem = make_experiment_problem({**settings, "effective_batch_size": 4, "budget": "64MiB", "space": space})
    train_data = tiny(**documents, sequences="padded").prepare().train
    assert isinstance(train_data, DynamicallyPaddedSequences)
    longest = f"longest micro-batch, of {max(train_data.lengths)} tokens"
    assert [note for note in problem.notes if longest in note] == [
        note for note in problem.notes if note.startswith(("sequences=padded", "sequences=grouped"))
    ]
    assert len([note for note in problem.notes if note.startswith("sequences=")]) == 2
    cpu, card = CPU, find_hardware("t4")
    assert tiny(sequences="grouped").notes(cpu) == ()
    [unseen] = tiny(sequences="grouped").notes(card)
    assert "as lengths vary, CUDA's allocator reserves more" in unseen
    assert tiny(sequences="fixed_length").notes(card) == ()
    vectors = tiny(model="encoder_stack", corpus="random_vectors", sequences="padded")
    assert vectors.notes(card) == () and not vectors.lengths_vary


def test_runs_that_differ_in_padding_compare() -> None:
    def row(sequences: str) -> Row:
        params = {"sequences": sequences, "sequence_length": 32}
        return Row(comparison="", name="", is_baseline=False, params=params, result=None, skipped=None, metrics={})

    assert not incomparable(row("grouped"), row("fixed_length")) | incomparable(row("padded"), row("grouped"))
    assert incomparable(row("packed"), row("padded")) == {"corpus"}


@pytest.mark.gpu
def test_each_step_on_a_card_says_what_is_reserved(documents: dict[str, Any], tmp_path: Path) -> None:
    settings = {**documents, "device": "cuda:0", "causal_lm__width": 256, "sequences": "padded", "num_steps": 12}
    result = execute(tiny(**settings, micro_batch_size=4), tmp_path / "log.txt")
    reserved = [step.reserved_bytes for step in result.steps]
    assert len(reserved) == 12 and result.memory is not None and result.memory.peak_reserved_bytes is not None
    held = [num_bytes for num_bytes in reserved if num_bytes is not None]
    assert len(held) == 12 and held == sorted(held) and 0 < held[-1] <= result.memory.peak_reserved_bytes
    assert step_metrics(result.steps[3])["reserved_mib"] == held[3] / MIB
