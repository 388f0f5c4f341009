"""The optimizer step and the loop: the same losses for any micro-batch size and technique, and what they record."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny, with_corpus_of
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from trainings import check_cuts, loop_of, steps_of

from pipeline.base.results import Finished, MemoryUse, StepRecord
from pipeline.config.experiment import Experiment
from pipeline.config.settings import MODELS
from pipeline.techniques.precision import Precision
from pipeline.training.loop import DivergedError, Loop, Message, learning_rate, rows_of_step, train
from pipeline.training.step import (
    StepOutput,
    Window,
    backpropagate,
    build_step,
    gradient_underflow_percent,
    make_optimizer,
    optimizer_step,
)


@pytest.mark.quick
@pytest.mark.matrix(2)
@pytest.mark.parametrize("sequences", ["packed", "fixed_length", "padded", "grouped"])
@pytest.mark.parametrize(("model"), ["gpt2-nano", "llama-nano", "encoder_stack"])
def test_losses_and_norms_do_not_depend_on_the_micro_batch_size(
    sequences: str, model: str, short_documents: Path
) -> None:
    text = {"corpus": "text_files", "text_files__path": short_documents}
    check_cuts(**{**text, **with_corpus_of(model), "sequences": sequences})


def test_padded_micro_batches_have_different_numbers_of_targets(short_documents: Path) -> None:
    """The micro-batches of a padded window have different numbers of targets, or the test above shows nothing."""
    experiment = tiny(corpus="text_files", text_files__path=short_documents, sequences="padded")
    prepared = experiment.prepare()
    batch = prepared.train.batch(rows_of_step(len(prepared.train), 0, 8, 0))
    counts = {prepared.train.count({k: v[i : i + 2] for k, v in batch.items()})[1] for i in range(0, 8, 2)}
    assert len(counts) > 1


@pytest.mark.matrix(2)
@pytest.mark.parametrize("model", ["gpt2-nano", "llama-nano", "qwen3-nano", "encoder_stack"])
@pytest.mark.parametrize(
    ("policy", "recomputed"), [("none", 0), ("every_layer", 4), ("every_2_layers", 2), ("every_3_layers", 2)]
)
def test_checkpointing_recomputes_the_blocks_of_its_policy(model: str, policy: str, recomputed: int) -> None:
    experiment = tiny(
        **with_corpus_of(model),
        checkpointing=policy,
        causal_lm__num_layers=4,
        encoder_stack__num_layers=4,
        micro_batch_size=4,
        accumulation_steps=2,
    )
    messages: list[Message] = []
    train(experiment, experiment.prepare(), messages.append)
    finished = messages[-1]
    assert isinstance(finished, Finished)
    assert finished.block_forwards_per_step == 2 * (4 + recomputed)


def step_and_window(experiment: Experiment) -> tuple[Any, Window]:
    step, loop = loop_of(experiment)
    return step, loop.window(0)


def test_contexts_of_several_techniques_are_all_entered() -> None:
    entered: list[str] = []

    def context(name: str) -> Any:
        @contextmanager
        def enter() -> Iterator[None]:
            entered.append(name)
            yield
            entered.append(f"end of {name}")

        return enter

    step = step_and_window(tiny())[0]
    step = step.with_run_context(context("first")).with_forward_context(context("outer"))
    step = Precision(precision="bf16").apply(step)
    step = step.with_run_context(context("second")).with_forward_context(context("inner"))
    with step.run_context():
        assert entered == ["first", "second"]
        with step.forward_context():
            assert entered[2:] == ["outer", "inner"]
            assert torch.is_autocast_enabled("cpu")
    assert entered[4:] == ["end of inner", "end of outer", "end of second", "end of first"]


def test_techniques_are_sorted_by_stage_and_name() -> None:
    stages = [(technique.stage, type(technique).__name__) for technique in tiny().techniques]
    assert stages == sorted(stages)


def test_techniques_may_be_applied_in_any_order() -> None:
    experiment = tiny(precision="bf16", checkpointing="every_layer", micro_batch_size=2, accumulation_steps=4)
    prepared = experiment.prepare()

    def first_loss(techniques: tuple[Any, ...]) -> float:
        torch.manual_seed(0)
        model = experiment.model.build(experiment.settings.model, prepared.vocabulary_size)
        step = replace(step_and_window(experiment)[0], trainable=model)
        for technique in techniques:
            step = technique.apply(step)
        optimizer = make_optimizer(model.module, experiment.settings)
        window = step_and_window(experiment)[1]
        return optimizer_step(step, optimizer, window.batches, window.num_targets, 1.0).loss.item()

    assert first_loss(experiment.techniques) == first_loss(tuple(reversed(experiment.techniques)))


def test_the_old_name_of_checkpointing_in_transformers_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    if not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("this transformers has the old name alone")
    new = steps_of(tiny(checkpointing="every_2_layers", causal_lm__num_layers=4))

    def enable(module: PreTrainedModel, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        module._set_gradient_checkpointing(True, partial(checkpoint, **gradient_checkpointing_kwargs))

    monkeypatch.delattr(PreTrainedModel, "activation_checkpointing_enable")
    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", enable)
    experiment = tiny(checkpointing="every_2_layers", causal_lm__num_layers=4)
    messages: list[Message] = []
    train(experiment, experiment.prepare(), messages.append)
    assert [m.loss for m in messages if isinstance(m, StepRecord)] == pytest.approx([r.loss for r in new], rel=1e-6)
    assert isinstance(messages[-1], Finished)
    assert messages[-1].block_forwards_per_step == 4 + 2


def test_gradients_are_clipped_and_their_norm_before_that_is_returned() -> None:
    experiment = tiny()
    step, window = step_and_window(experiment)
    optimizer = torch.optim.SGD(step.trainable.module.parameters(), lr=1.0)
    before = [p.detach().clone() for p in step.trainable.module.parameters()]
    norm = optimizer_step(step, optimizer, window.batches, window.num_targets, 0.1).grad_norm.item()
    after = [p.detach() for p in step.trainable.module.parameters()]
    moved = math.sqrt(sum(float((a - b).pow(2).sum()) for a, b in zip(after, before, strict=True)))
    assert norm > 0.1
    assert moved == pytest.approx(0.1, rel=1e-4)
    assert all(p.grad is None for p in step.trainable.module.parameters())


def test_an_infinite_loss_ends_the_run_with_its_step() -> None:
    with pytest.raises(DivergedError, match="optimizer step 1 is nan"):
        steps_of(tiny(learning_rate=1e30))


def test_fp16_steps_that_overflow_are_skipped_and_recorded() -> None:
    records = steps_of(tiny(precision="fp16", initial_loss_scale=2.0**40, num_steps=30))
    skipped = [record for record in records if record.skipped]
    assert skipped and not records[-1].skipped
    assert len(records) == 30
    for before, after in pairwise(records):
        assert before.loss_scale is not None
        assert after.loss_scale == (before.loss_scale / 2 if before.skipped else before.loss_scale)


READS = ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy")


@pytest.mark.parametrize("settings", [{}, {"precision": "fp16"}, {"checkpointing": "every_layer"}], ids=str)
def test_a_step_reads_no_tensor(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """encoder_stack, since transformers' mask code reads one tensor in each forward pass."""
    step, window = step_and_window(tiny(**with_corpus_of("encoder_stack"), **settings))
    optimizer = make_optimizer(step.trainable.module, tiny().settings)
    optimizer_step(step, optimizer, window.batches, window.num_targets, 1.0)

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read inside the step")

    for read in READS:
        monkeypatch.setattr(torch.Tensor, read, refuse)
    optimizer_step(step, optimizer, window.batches, window.num_targets, 1.0)


@pytest.mark.parametrize("family", [name for name, family in MODELS.items() if family.names])
def test_evaluation_does_not_depend_on_the_micro_batch_size(family: str) -> None:
    model = "gpt2-nano" if family == "causal_lm" else family

    def eval_loss(**cut: int) -> float:
        messages: list[Message] = []
        experiment = tiny(**with_corpus_of(model), **cut, eval_steps=1)
        train(experiment, experiment.prepare(), messages.append)
        assert isinstance(messages[-1], Finished)
        assert messages[-1].eval_loss is not None
        return messages[-1].eval_loss

    assert eval_loss(micro_batch_size=8) == pytest.approx(eval_loss(micro_batch_size=2, accumulation_steps=4), rel=1e-5)


def test_underflow_is_the_share_that_fp16_rounds_to_zero() -> None:
    step, window = step_and_window(tiny())
    module = step.trainable.module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    lost = gradient_underflow_percent(step, optimizer, window)
    backpropagate(step, window.batches, window.num_targets)
    gradients = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    zeroed = (gradients != 0) & (gradients.half() == 0)
    assert lost == pytest.approx(100 * float(zeroed.sum() / (gradients != 0).sum()))
    assert 0 < lost < 100


@given(
    num_sequences=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    steps=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_each_sequence_occurs_once_in_an_epoch(num_sequences: int, batch_size: int, steps: int, seed: int) -> None:
    seen = [row for step in range(steps) for row in rows_of_step(num_sequences, step, batch_size, seed)]
    assert len(seen) == steps * batch_size
    for start in range(0, len(seen) - num_sequences + 1, num_sequences):
        assert sorted(seen[start : start + num_sequences]) == list(range(num_sequences))


def test_epochs_and_seeds_have_different_orders() -> None:
    first, second = rows_of_step(50, 0, 50, 0), rows_of_step(50, 1, 50, 0)
    assert first != second
    assert first != rows_of_step(50, 0, 50, 1)
    assert first == rows_of_step(50, 0, 50, 0)


def test_learning_rate_warms_up_scales_and_decays() -> None:
    def rates(effective: int = 8, **settings: Any) -> list[float]:
        experiment = tiny(num_steps=8, learning_rate=1.0, learning_rate_warmup_steps=2, **settings)
        return [learning_rate(step, experiment.settings, effective) for step in range(8)]

    assert rates() == [0.5, *[1.0] * 7]
    assert rates(32, learning_rate_scaling="linear")[-1] == 4.0
    assert rates(32, learning_rate_scaling="sqrt")[-1] == 2.0
    falling = rates(learning_rate_schedule="linear")
    assert falling[2] == 1.0
    assert falling[-1] == pytest.approx(1 / 6)
    cosine = rates(learning_rate_schedule="cosine")
    assert cosine[:3] == [0.5, 1.0, 1.0] and cosine[5] == pytest.approx(0.5) and 0 < cosine[-1] < falling[-1]


def test_the_memory_peak_covers_two_steps_and_all_phases() -> None:
    messages: list[Message] = []
    experiment = tiny()
    train(experiment, experiment.prepare(), messages.append)
    memory = [message for message in messages if isinstance(message, MemoryUse)][-1]
    phases = {(phase.step, phase.phase): phase.allocated_bytes for phase in memory.phases}
    assert list(phases) == [(0, "load"), *[(s, p) for s in (0, 1) for p in ("forward", "backward", "optimizer")]]
    model = experiment.model.build("gpt2-nano", 512).module
    weights = sum(p.nbytes for p in model.parameters())
    assert phases[0, "load"] == pytest.approx(weights, rel=0.01)
    assert phases[0, "optimizer"] == pytest.approx(3 * weights, rel=0.02)  # weights and AdamW's two moments
    assert phases[1, "forward"] - phases[0, "forward"] == pytest.approx(2 * weights, rel=0.02)
    assert memory.peak_allocated_bytes is not None
    assert memory.peak_allocated_bytes >= max(phases.values())


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_forward_pass_computes_in_its_precision(precision: str, dtype: torch.dtype) -> None:
    step, window = step_and_window(tiny(precision=precision))
    with step.forward_context():
        logits = step.trainable.module(input_ids=window.batches[0]["input_ids"]).logits
    assert logits.dtype == dtype
    assert {p.dtype for p in step.trainable.module.parameters()} == {torch.float32}


@pytest.mark.parametrize(("precision", "products"), [("fp32", "highest"), ("bf16", "highest"), ("tf32", "high")])
def test_float32_products_are_set_for_the_run_and_restored(precision: str, products: str) -> None:
    step = Precision(precision=precision).apply(step_and_window(tiny())[0])  # type: ignore[arg-type]
    before = torch.get_float32_matmul_precision()
    with step.run_context():
        assert torch.get_float32_matmul_precision() == products
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("model", ["gpt2-nano", "llama-nano", "qwen3-nano"])
def test_the_loss_is_that_of_transformers(model: str) -> None:
    step, window = step_and_window(tiny(model=model, sequences="padded"))
    batch, module = window.batches[0], step.trainable.module
    ours = step.trainable.loss(module, batch, window.num_targets)
    theirs = module(**batch, num_items_in_batch=window.num_targets).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


class FakeStream:
    """A stream that runs queued work only when it is waited for."""

    def __init__(self) -> None:
        self.queued = self.done = 0

    def enqueue(self) -> int:
        """Queue one piece of work and return its number."""
        self.queued += 1
        return self.queued

    def wait(self, number: int) -> None:
        """Run everything up to this piece of work."""
        self.done = max(self.done, number)


class FakeScalar:
    """A tensor of one element on a fake device, or a copy of one in host memory."""

    def __init__(self, stream: FakeStream, on_device: bool) -> None:
        self._stream, self._on_device, self._work = stream, on_device, stream.enqueue()

    def to(self, device: str, non_blocking: bool) -> "FakeScalar":
        assert device == "cpu" and non_blocking
        return FakeScalar(self._stream, on_device=False)

    def item(self) -> float:
        if self._on_device:
            self._stream.wait(self._stream.queued)  # as torch does: all work that is queued
        assert self._stream.done >= self._work, "the value was read before its copy was done"
        return 1.0


def test_reading_a_step_waits_for_its_own_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the next step is queued already, and reading must not drain the device."""
    stream, ends, waited = FakeStream(), [], []

    class FakeEvent:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.work = stream.enqueue()
            ends.append(self.work)

        def synchronize(self) -> None:
            waited.append(ends.index(self.work))
            stream.wait(self.work)

        def elapsed_time(self, end: "FakeEvent") -> float:
            return 1000.0

    def launch(*_: object) -> StepOutput:
        return StepOutput(*(FakeScalar(stream, on_device=True) for _ in range(3)))  # type: ignore[arg-type]

    monkeypatch.setattr("pipeline.training.loop.optimizer_step", launch)
    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    experiment = tiny()
    prepared = experiment.prepare()
    step = build_step(experiment, prepared)
    records: list[StepRecord] = []
    behind: list[int] = []

    def emit(record: Any) -> None:
        records.append(record)
        behind.append(stream.queued - stream.done)

    optimizer = step.make_optimizer(step.trainable.module)
    Loop(experiment, prepared.train, replace(step, device=torch.device("cuda")), optimizer, emit).advance(4)
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert waited == [1, 2, 3, 4]  # the event before the first step is the start of its time
    assert all(behind[:3]) and not behind[3], "each step but the last is read while the next one is still queued"
