"""Packed documents that are kept apart: the training of the same documents one by one, and its predicted memory."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import pairs, tiny
from hypothesis import given
from hypothesis import strategies as st
from test_lengths import LENGTH, stores
from test_prediction import CPU
from trainings import check_peak
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config.experiment import Experiment
from pipeline.data._support.packing import best_fit
from pipeline.data._support.sequences import IGNORED_LABEL, PackedDocuments, PaddedSequences, TokenStore
from pipeline.prediction.predict import predict
from pipeline.training.step import backpropagate, build_step

CONVERSATIONS: dict[str, Any] = {"corpus": "chat", "sequence_length": 128, "causal_lm__num_layers": 3}
TECHNIQUES = (
    {},
    {"attention": "eager"},
    {"checkpointing": "every_layer"},
    {"checkpointing": "attention_saved"},
    {"loss_kernel": "chunked"},
    {"adapter": "lora"},
)
MODELS = ("gpt2-nano", "llama-nano", "qwen3-nano")


@given(lengths=st.lists(st.integers(1, 20), max_size=60))
def test_every_document_is_in_one_sequence_and_no_two_sequences_fit_into_one(lengths: list[int]) -> None:
    packed = best_fit(lengths, 20)
    assert sorted(number for row in packed for number in row) == list(range(len(lengths)))
    filled = sorted(sum(lengths[number] for number in row) for row in packed)
    assert all(total <= 20 for total in filled)
    assert sum(filled[:2]) > 20 or len(filled) < 2


@given(store=stores())
def test_sequences_have_the_documents_of_padded_ones_and_no_target_without_a_token_before_it(store: TokenStore) -> None:
    packed, padded = PackedDocuments(store, LENGTH), PaddedSequences(store, LENGTH)
    batch, documents = packed.batch(range(len(packed))), padded.batch(range(len(padded)))
    found = set()
    for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), LENGTH]
        for start, end in pairwise(starts):
            assert positions[start:end].tolist() == list(range(end - start))
            assert labels[start] == IGNORED_LABEL
            found.add((*ids[start:end][ids[start:end] != 0].tolist(), *labels[start + 1 : end].tolist()))
    wanted = set()
    for ids, labels in zip(documents["input_ids"], documents["labels"], strict=True):
        end = int((ids != 0).sum())
        wanted.add((*ids[:end].tolist(), *labels[1:end].tolist()))
    assert {row for row in found if row and row[0] > 0} == wanted
    assert packed.count(batch) == padded.count(documents)
    assert packed.mean_tokens() * len(packed) == pytest.approx(packed.count(batch)[0])
    assert packed.num_positions(batch) == len(packed) * LENGTH


def loss_and_gradients(experiment: Experiment, prepared: Any, sequences: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and gradients of all sequences in micro-batches of four."""
    torch.manual_seed(0)
    step = build_step(experiment, prepared)
    batches = sequences.micro_batches(range(len(sequences)), 4)
    num_targets = sum(sequences.count(batch)[1] for batch in batches)
    with step.run_context():
        loss = backpropagate(step, batches, num_targets)
    gradients = {
        name: parameter.grad
        for name, parameter in step.trainable.module.named_parameters()
        if parameter.grad is not None
    }
    assert len(sequences) > 4 and gradients
    return float(loss), gradients


@pytest.mark.matrix(2)
@pytest.mark.parametrize("settings", TECHNIQUES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_loss_and_gradients_are_those_of_the_documents_one_by_one(model: str, settings: dict[str, Any]) -> None:
    packed, padded = (
        tiny(**CONVERSATIONS, model=model, sequences=kind, **settings) for kind in ("packed_documents", "padded")
    )
    prepared = packed.prepare()
    assert isinstance(prepared.train, PackedDocuments)
    documents = prepared.train.documents
    loss, gradients = loss_and_gradients(packed, prepared, prepared.train)
    alone, wanted = loss_and_gradients(padded, prepared, documents)
    assert len(prepared.train) < 0.6 * len(documents)
    assert loss == pytest.approx(alone, rel=1e-5)
    whole = float(torch.stack([gradient.norm() for gradient in wanted.values()]).norm())
    for name, gradient in wanted.items():
        assert float((gradients[name] - gradient).norm()) <= 1e-5 * whole, name


def test_joined_documents_have_another_loss() -> None:
    """Or the test above shows nothing."""
    experiment = tiny(**CONVERSATIONS, sequences="packed_documents")
    sequences = experiment.prepare().train
    trainable = build_step(experiment, experiment.prepare()).trainable
    batch = sequences.batch(range(len(sequences) - 4, len(sequences)))  # of several documents each: the shorter ones
    joined = {name: tensor for name, tensor in batch.items() if name != "position_ids"}
    losses = [float(trainable.loss(trainable.module, each, 1).detach()) for each in (batch, joined)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("model", "settings"), pairs(MODELS, TECHNIQUES))
def test_the_predicted_peak_is_the_measured_one(model: str, settings: dict[str, Any]) -> None:
    shared = {**CONVERSATIONS, "sequences": "packed_documents", "micro_batch_size": 4, "eval_steps": 0}
    check_peak(tiny(**shared, model=model, **settings))


def test_the_mask_takes_memory_that_is_predicted() -> None:
    whole = {**CONVERSATIONS, "micro_batch_size": 8}
    with_mask, without = (tiny(**whole, sequences=kind) for kind in ("packed_documents", "packed"))
    assert predict(with_mask, CPU).peak_allocated_bytes > predict(without, CPU).peak_allocated_bytes


def saved(folder: Path, model_type: str, **values: Any) -> str:
    """Write the configuration of a small model into a folder and return its name."""
    AutoConfig.for_model(model_type, **values).save_pretrained(folder)
    return str(folder)


def refusal(**settings: Any) -> str:
    """Return why an experiment with packed documents is refused."""
    reason = tiny(sequences="packed_documents", **settings).unsupported()
    assert reason is not None
    return reason


def test_models_that_would_mix_documents_are_refused(tmp_path: Path) -> None:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 512}
    shape: dict[str, Any] = {"causal_lm": {"num_layers": None, "width": None, "num_heads": None}}
    bloom = saved(tmp_path / "bloom", "bloom", hidden_size=32, n_layer=2, n_head=2, vocab_size=512)
    mamba = saved(tmp_path / "mamba", "mamba", **size)
    remedy = "set sequences=packed, padded or grouped"
    for model, reason in ((bloom, "does not take position_ids"), (mamba, "not attention")):
        message = refusal(model=model, **shape)
        assert reason in message and remedy in message and model in message
    message = refusal(model="encoder_stack", corpus="random_vectors")
    assert "encoder_stack is not of transformers" in message and remedy in message
    llama = saved(tmp_path / "llama", "llama", **size, intermediate_size=64, num_attention_heads=2)
    assert tiny(sequences="packed_documents", model=llama, **shape).unsupported() is None


def test_flash_attention_takes_one_sequence_at_a_time() -> None:
    message = refusal(attention="flash", precision="bf16", micro_batch_size=2)
    assert "micro_batch_size is 2" in message and "set micro_batch_size=1" in message


def test_a_document_is_as_long_as_a_sequence_at_most() -> None:
    store = TokenStore(np.arange(1, 101, dtype=np.int32), np.array([0, 50, 100]))
    assert len(PackedDocuments(store, 32)) == 2
    assert PackedDocuments(store, 32).mean_tokens() == 32


def test_transformers_reads_documents_from_positions() -> None:
    """Two documents in a row have the logits of each alone."""
    config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 64, (1, 10))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [model(input_ids=part, use_cache=False).logits for part in (ids[:, :4], ids[:, 4:])]
    assert torch.allclose(together, torch.cat(alone, dim=1), atol=1e-5)
