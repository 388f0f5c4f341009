"""Checkpointing by policy: the same training, what is recomputed, and the policies that `auto` finds."""

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import ROOT, tiny, with_corpus_of
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_export import losses_here, losses_of_script
from test_training_step import step_and_window
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipeline.cli import main
from pipeline.config.experiment import Experiment
from pipeline.export.write import export_files, write_files
from pipeline.jobs.plan import make_plan
from pipeline.memory.attention_saved import attention_saved_contexts
from pipeline.memory.device import hardware_of
from pipeline.planning.checkpointing_policy import Counts, Layer, least_recomputation, resolved
from pipeline.prediction.predict import predict
from pipeline.runtime.run import execute
from pipeline.techniques.checkpointing import Checkpointing, as_text
from pipeline.training.step import backpropagate

POLICIES = ("attention_saved", "offloaded", "full:0,attention_saved:1,offloaded:2")
LAYERS: dict[str, Any] = {"causal_lm__num_layers": 4, "encoder_stack__num_layers": 4}
DROPOUT: dict[str, Any] = {"causal_lm__dropout": 0.2, "encoder_stack__dropout": 0.2}
OWN = {"model": "experiments.examples.own:build_model", "corpus": "experiments.examples.own:read_corpus"}
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def trained(experiment: Experiment, num_steps: int = 10) -> list[Tensor]:
    """Return the losses of some optimizer steps and the parameters after them."""
    step, window = step_and_window(experiment)
    optimizer = step.make_optimizer(step.trainable.module)
    losses: list[Tensor] = []
    torch.manual_seed(1)
    with step.run_context():
        for _ in range(num_steps):
            losses += backpropagate(step, window.batches, window.num_targets)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return [*losses, *step.trainable.module.parameters()]


@pytest.mark.quick
@pytest.mark.matrix(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {**with_corpus_of("llama-nano"), "accumulation_steps": 4, "micro_batch_size": 2},
        {"sequences": "padded", "accumulation_steps": 4, "micro_batch_size": 2},
        {**with_corpus_of("qwen3-nano"), "precision": "bf16"},
        {**with_corpus_of("encoder_stack"), "accumulation_steps": 4, "micro_batch_size": 2},
        OWN,
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_every_weight_is_the_same_after_ten_steps(
    settings: dict[str, Any], policy: str, short_documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    padded = {"corpus": "text_files", "text_files__path": short_documents} if "sequences" in settings else {}
    alike = {**LAYERS, **DROPOUT, **padded, **settings}
    plain, other = trained(tiny(**alike)), trained(tiny(**alike, checkpointing=policy))
    assert all(torch.equal(one, same) for one, same in zip(plain, other, strict=True))


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


def calls(**settings: Any) -> Counter[Any]:
    """Return the operators of one forward and backward pass."""
    step, window = step_and_window(tiny(**LAYERS, **settings))
    with Calls() as counted:
        backpropagate(step, window.batches, window.num_targets)
    return counted.count


@pytest.mark.parametrize("model", ["gpt2-nano", "llama-nano", "encoder_stack"])
@pytest.mark.parametrize(
    ("policy", "attentions"), [("every_layer", 8), ("attention_saved", 4), ("full:0,attention_saved:1-2", 5)]
)
def test_attention_is_not_recomputed_where_it_is_saved(model: str, policy: str, attentions: int) -> None:
    assert calls(**with_corpus_of(model), checkpointing=policy)[ATTENTION] == attentions


def test_of_eager_attention_the_product_of_weights_and_values_is_not_recomputed() -> None:
    """With dropout, a CPU computes attention by its two matrix products, as eager attention does."""
    bmm = torch.ops.aten.bmm.default
    whole, saved, none = (calls(**DROPOUT, checkpointing=each)[bmm] for each in ("every_layer", *POLICIES[:1], "none"))
    assert (whole - none, saved - none) == (2 * 4, 4)


def attend(random_states: list[Tensor], query: Tensor) -> Tensor:
    """Compute attention with dropout, then dropout; note the state of the random generator between them."""
    result = F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    random_states.append(torch.cuda.get_rng_state())
    return F.dropout(result, 0.5) * 2


@pytest.mark.gpu
def test_dropout_after_saved_attention_draws_the_same_numbers() -> None:
    query = torch.ones(2, 2, 16, 32, device="cuda", dtype=torch.float16, requires_grad=True)
    states: list[Tensor] = []
    before = torch.cuda.get_rng_state()
    contexts = {"context_fn": attention_saved_contexts}
    checkpoint(partial(attend, states), query, use_reentrant=False, **contexts).sum().backward()
    first, second = states
    assert torch.equal(first, second) and not torch.equal(first, before)


def test_a_result_that_is_changed_in_place_is_refused() -> None:
    def change(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query).mul_(2).exp()

    query = torch.ones(1, 2, 4, 8, requires_grad=True)
    result = checkpoint(change, query, use_reentrant=False, context_fn=attention_saved_contexts)
    with pytest.raises(RuntimeError, match="changed in place"):
        result.sum().backward()


@given(st.lists(st.sampled_from(["none", "full", "attention_saved", "offloaded"]), min_size=1, max_size=20))
def test_policies_are_read_as_they_are_written(policies: list[str]) -> None:
    assert Checkpointing(checkpointing=as_text(tuple(policies))).by_layer(len(policies)) == tuple(policies)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpointing", "full:3-1"], "each range ascending and each layer in one of them, and is 'full:3-1'"),
        (["--checkpointing", "full:0-2,offloaded:2"], "each layer in one of them"),
        (["--checkpointing", "some:0"], "policies with their layers as in full:0-7"),
        (["--checkpointing", "full:0-4"], "must name layers that the model has, 0 to 3, and is full:0-4; end it at 3"),
        (["--checkpointing", "auto"], "checkpointing=auto needs a memory budget, .* and budget is none; set budget"),
        (["--checkpointing", "offloaded", "--activation_offloading", "true"], "set checkpointing=every_layer"),
        (["--checkpointing", "auto", "--budget", "9MiB"], "recomputing every layer needs, .* and is 9.0 MiB; raise"),
    ],
)
def test_a_wrong_policy_gives_a_clear_error(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["main", "--device", "cpu", "--model", "gpt2-nano", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_peak_is_predicted(policy: str, tmp_path: Path) -> None:
    experiment = tiny(**LAYERS, checkpointing=policy, sequence_length=64)
    result = execute(experiment, tmp_path / "log")
    assert result.memory is not None and result.memory.peak_allocated_bytes is not None
    predicted = predict(experiment, hardware_of(experiment.device)).peak_allocated_bytes
    assert predicted == pytest.approx(result.memory.peak_allocated_bytes, rel=1e-4)


layer = st.builds(Layer, flops=st.integers(0, 9).map(float), num_bytes=st.integers(0, 9).map(float))


@given(st.integers(1, 6), layer, layer, layer, st.integers(0, 60))
def test_the_knapsack_is_solved_exactly(num_layers: int, full: Layer, saved: Layer, none: Layer, limit: int) -> None:
    def total(counts: Counts) -> tuple[float, float]:
        parts = list(zip(counts, (full, saved, none), strict=True))
        return sum(n * each.flops for n, each in parts), sum(n * each.num_bytes for n, each in parts)

    every = [Counts(a, b, num_layers - a - b) for a in range(num_layers + 1) for b in range(num_layers + 1 - a)]
    best = min((total(counts)[0] for counts in every if total(counts)[1] <= limit), default=None)
    frontier = least_recomputation(num_layers, full, saved, none)
    found = next((total(counts)[0] for counts in frontier if total(counts)[1] <= limit), None)
    assert found == best
    assert frontier == sorted(frontier, key=lambda counts: total(counts))


def test_auto_recomputes_less_the_more_memory_there_is() -> None:
    shape: dict[str, Any] = {"causal_lm__num_layers": 3, "sequence_length": 128}
    target = hardware_of(torch.device("cpu"))
    predicted = {each: predict(tiny(**shape, checkpointing=each), target) for each in ("every_layer", "none")}
    lean, plain = (one.peak_bytes for one in predicted.values())
    flops = []
    for share in (0.0, 0.5, 1.0):
        budget_bytes = int(lean + share * (plain - lean))
        found = resolved(tiny(**shape, checkpointing="auto"), budget_bytes=budget_bytes)
        prediction = predict(found, target)
        assert prediction.fits(budget_bytes)
        flops.append(prediction.sequence_flops)
    assert flops == sorted(flops, reverse=True) and len(set(flops)) == 3
    assert found.settings.checkpointing == "none"  # type: ignore[attr-defined]


def test_a_run_with_auto_has_explicit_policies_and_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    shape = ["--causal_lm.num_layers", "4", "--causal_lm.width", "32", "--causal_lm.num_heads", "2", "--device", "cpu"]
    words = ["--model", "gpt2-nano", "--vocabulary_size", "512", "--sequence_length", "128", "--num_steps", "4", *shape]
    assert main(["main", "--checkpointing", "auto", "--budget", "12MiB", *words]) == 0
    [config] = tmp_path.glob("runs/*/*/config.yaml")
    [result] = tmp_path.glob("runs/*/*/result.json")
    assert ":" in yaml.safe_load(config.read_text())["checkpointing"]
    assert json.loads(result.read_text())["result"]["outcome"] == "ok"


def test_a_plan_with_auto_names_the_policies_for_each_micro_batch() -> None:
    shape = {"causal_lm": {"num_layers": 2, "width": 32}, "model": "gpt2-nano", "vocabulary_size": 512}
    space = {"micro_batch_size": [1, 16], "checkpointing": ["auto"], "precision": ["fp32"]}
    given = {"gpu": "cpu", "effective_batch_size": 16, "budget": "120MiB", "space": space, **shape}
    [card] = make_plan(given, Console(quiet=True)).cards
    found = {row.micro_batch_size: row.choice["checkpointing"] for row in card.rows}
    assert found[1] == "none" and "auto" not in found.values() and all(row.fits for row in card.rows)
    assert len(found) == 2 or any("checkpointing=auto must hold" in reason for reason in card.skipped)


@pytest.mark.parametrize("policy", ["full:0,attention_saved:1", "offloaded"])
def test_the_exported_script_checkpoints_by_policy(policy: str, tmp_path: Path) -> None:
    settings = {"checkpointing": policy, "causal_lm__dropout": 0.1, "causal_lm__num_layers": 3}
    files = export_files(tiny(**settings))
    write_files(files, tmp_path)
    assert "pipeline" not in files["train.py"]
    assert losses_of_script(str(tmp_path / "train.py")) == pytest.approx(losses_here(**settings), abs=1e-4)
    assert f"No argument expresses checkpointing={policy}: make_trainer applies it" in files["README.md"]
    assert '"activation_checkpointing": false' in files["training_arguments.json"]
    assert "layer.forward = partial(" in files["training_arguments.py"]
