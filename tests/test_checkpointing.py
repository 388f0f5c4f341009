"""Checkpointing by policy: the same training, what is recomputed, and what is refused."""

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import OWN, ROOT, tiny, with_corpus_of
from hypothesis import given
from hypothesis import strategies as st
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
from pipeline.prediction.predict import predict
from pipeline.runtime.run import execute
from pipeline.techniques.checkpointing import Checkpointing
from pipeline.training.step import backpropagate

POLICIES = ("attention_saved", "offloaded", "full:0,attention_saved:1,offloaded:2")
LAYERS: dict[str, Any] = {"causal_lm__num_layers": 4, "encoder_stack__num_layers": 4}
DROPOUT: dict[str, Any] = {"causal_lm__dropout": 0.2, "encoder_stack__dropout": 0.2}
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def trained(experiment: Experiment, num_steps: int = 10) -> list[Tensor]:
    """Return the losses of some optimizer steps and the parameters after them."""
    step, window = step_and_window(experiment)
    optimizer = step.make_optimizer(step.trainable.module)
    losses: list[Tensor] = []
    torch.manual_seed(1)
    with step.run_context():
        for _ in range(num_steps):
            losses.append(backpropagate(step, window.batches, window.num_targets))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return [*losses, *step.trainable.module.parameters()]


@pytest.mark.quick
@pytest.mark.matrix(2)
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


@given(st.sampled_from(["full", "attention_saved", "offloaded"]), st.integers(1, 99), st.integers(1, 100))
def test_a_share_of_the_layers_is_that_of_the_first_ones(policy: str, percent: int, num_layers: int) -> None:
    policies = Checkpointing(checkpointing=f"{policy}:{percent}%").by_layer(num_layers)
    count = policies.count(policy)
    assert policies == (policy,) * count + ("none",) * (num_layers - count)
    assert count == 1 or abs(count - percent * num_layers / 100) <= 0.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpointing", "full:3-1"], "each range ascending and each layer in one of them, and is 'full:3-1'"),
        (["--checkpointing", "full:0-2,offloaded:2"], "each layer in one of them"),
        (["--checkpointing", "some:0"], "policies with their layers as in full:0-7"),
        (["--checkpointing", "full:0-4"], "must name layers that the model has, 0 to 3, and is full:0-4; end it at 3"),
        (["--checkpointing", "auto"], "fitproof plan finds .*, with --space .*is 'auto'"),
        (["--checkpointing", "full:100%"], "a policy with its share of the layers as in full:25%"),
        (["--checkpointing", "offloaded", "--activation_offloading", "true"], "set checkpointing=every_layer"),
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


@pytest.mark.parametrize("entry", ["combined", "profiling", "export", "search"])
def test_every_entry_point_says_which_command_finds_a_policy(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "auto.yaml").write_text("model: gpt2-nano\ndevice: cpu\ncheckpointing: auto\n")
    words = {"search": ["--space", '{"checkpointing": ["auto"]}'], "export": ["--config", "auto.yaml"]}
    assert main([entry, *words.get(entry, ["--model", "gpt2-nano", "--checkpointing", "auto"])]) == 2
    assert re.search("checkpointing must .* fitproof plan finds .* and is 'auto'", capsys.readouterr().err)


def test_a_plan_finds_how_many_layers_to_recompute() -> None:
    """With the command that the error names; of a model of fewer layers, what names one that it lacks is left out."""
    policies = ["none", "full:25%", "full:50%", "full:75%", "every_layer", "full:0-9"]
    shape = {"causal_lm": {"num_layers": 4, "width": 32}, "model": "gpt2-nano", "vocabulary_size": 512}
    space = {"micro_batch_size": [16], "checkpointing": policies, "precision": ["fp32"]}
    given = {"gpu": "cpu", "effective_batch_size": 16, "space": space, **shape}
    [card] = make_plan(given).cards
    peaks = {row.choice["checkpointing"]: row.peak_bytes for row in card.rows}
    assert [*peaks] == policies[:-1] and [*peaks.values()] == sorted(peaks.values(), reverse=True)
    assert any("layers that the model has, 0 to 3, and is full:0-9" in reason for reason in card.skipped)
    [card] = make_plan({**given, "budget": f"{peaks['full:50%'] // 2**20 + 1}MiB"}).cards
    assert card.recommended is not None and card.recommended.choice["checkpointing"] == "full:50%"


@pytest.mark.matrix(1)
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
