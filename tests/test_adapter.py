"""Adapters: the training of a plain loop with peft, what is frozen, predicted peaks, exports, and bad input."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CPU, TINY, pairs, tiny, with_corpus_of
from test_export import run_framework
from test_prediction import measured
from torch import nn
from trainings import SMALL_BATCH, check_cuts, check_peak, check_peak_on_card, loop_of, losses, plainly_trained, trained
from transformers import AutoConfig

from pipeline.base.contracts import Trainable
from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Finished
from pipeline.config.experiment import Experiment
from pipeline.export.write import export_files, write_files
from pipeline.searching.experiment_problem import make_experiment_problem
from pipeline.techniques._support.lora import linear_layers
from pipeline.training.loop import train
from pipeline.training.step import backpropagate, build_step

LORA: dict[str, Any] = {"adapter": "lora", "adapter_rank": 4, "adapter_alpha": 8, "learning_rate": 1e-2}
TRANSPOSED_BYTES = 60 * 60 * 4
"""What torch takes on a CPU while it copies a transposed matrix, as an embedding's gradient: not predicted."""
GEMMA: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 8, "tie_word_embeddings": True}


def write_configuration(folder: Path, kind: str, **changes: Any) -> None:
    """Write a narrow model's configuration for transformers to a folder."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=512, pad_token_id=None, **{**shape, **changes})
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config.to_json_string())


@pytest.mark.matrix(2)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which get_peft_model reads
@pytest.mark.parametrize("sequences", ["packed", "padded"])
@pytest.mark.parametrize("cut", [(8, 1), (2, 4)], ids=str)
@pytest.mark.parametrize(
    ("model", "targets", "modules"),
    [
        ("gpt2-nano", "attention", ["c_attn", "attn.c_proj"]),
        ("llama-nano", "all", "all-linear"),
        ("qwen3-nano", "q_proj,mlp.down_proj", ["q_proj", "down_proj"]),
        ("gemma", "all", "all-linear"),
        (
            "llama-nano",
            "attention,lm_head,embed_tokens",
            [f"{one}_proj" for one in "qkvo"] + ["lm_head", "embed_tokens"],
        ),
    ],
)
def test_losses_are_those_of_a_plain_loop_with_peft(
    model: str, targets: str, modules: Any, cut: tuple[int, int], sequences: str, short_documents: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    shared: dict[str, Any] = {"model": model}
    if model == "gemma":
        write_configuration(tmp_path / model, "gemma3_text", **GEMMA)
        shared = {"model": str(tmp_path / model), "causal_lm": {}}
    text = {"corpus": "text_files", "text_files__path": str(short_documents), "sequences": sequences}
    more = {**shared, **text, "micro_batch_size": cut[0], "accumulation_steps": cut[1]}
    experiment = tiny(**LORA, adapter_targets=targets, **more)
    _, loop, records = trained(experiment)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=modules, fan_in_fan_out=model == "gpt2-nano")
    _, expected, norms = plainly_trained(experiment, loop, 10, lambda module: get_peft_model(module, lora))
    assert [record.loss for record in records] == pytest.approx(expected, rel=1e-5)
    assert [record.grad_norm for record in records] == pytest.approx(norms, rel=1e-4)
    assert losses(tiny(learning_rate=1e-2, **more)) != pytest.approx(expected, rel=1e-3), (
        "that is no adapter's training"
    )


@pytest.mark.matrix(2)
@pytest.mark.parametrize("sequences", ["packed", "padded"])
@pytest.mark.parametrize("model", ["gpt2-nano", "llama-nano"])
def test_losses_do_not_depend_on_the_micro_batch_size(model: str, sequences: str, short_documents: Path) -> None:
    text = {"corpus": "text_files", "text_files__path": str(short_documents), "sequences": sequences}
    check_cuts(**LORA, **text, model=model)


def adapters_alone_are_trained(experiment: Experiment, dtype: torch.dtype = torch.float32) -> Trainable:
    """Check that only adapters are trained, and have gradients and state, all of a type; return the model."""
    step, loop = loop_of(experiment)
    module, optimizer = step.trainable.module, loop.optimizer
    before = {name: part.detach().clone() for name, part in module.named_parameters()}
    loop.advance(3)
    window = loop.window(3)
    backpropagate(step, window.batches, window.num_targets)
    names = {part: name for name, part in module.named_parameters()}
    adapters = {name for name in before if "lora_" in name}
    assert adapters and {names[part] for group in optimizer.param_groups for part in group["params"]} == adapters
    assert {names[part] for part in optimizer.state} == adapters
    for name, part in module.named_parameters():
        assert (part.grad is not None) == (name in adapters)
        assert torch.equal(part, before[name]) == (name not in adapters)
        assert part.grad is None or part.dtype is part.grad.dtype is optimizer.state[part]["exp_avg"].dtype is dtype
    return step.trainable


@pytest.mark.parametrize("more", [{}, {"weights": "bfloat16"}, {"adapter_weights": "bfloat16"}], ids=str)
@pytest.mark.parametrize("model", ["gpt2-nano", "llama-nano"])
def test_only_adapters_are_trained_and_have_gradients_and_state(model: str, more: dict[str, Any]) -> None:
    adapters_alone_are_trained(
        tiny(**LORA, model=model, **more), getattr(torch, more.get("adapter_weights", "float32"))
    )


@pytest.mark.parametrize(
    ("model", "targets", "adapted"),
    [
        ("gpt2-nano", "attention", {"attn.c_attn", "attn.c_proj"}),
        ("gpt2-nano", "all", {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        ("gpt2-nano", "c_proj", {"attn.c_proj", "mlp.c_proj"}),
        ("gpt2-nano", "mlp.c_proj", {"mlp.c_proj"}),
        ("llama-nano", "attention", {f"self_attn.{name}_proj" for name in "qkvo"}),
        ("llama-nano", "up_proj,self_attn.v_proj", {"mlp.up_proj", "self_attn.v_proj"}),
    ],
)
def test_targets_are_linear_layers_of_every_layer(model: str, targets: str, adapted: set[str]) -> None:
    experiment = tiny(**LORA, model=model, adapter_targets=targets)
    step = build_step(experiment, experiment.prepare())
    for layer in step.trainable.layers:
        assert {name for name, part in layer.named_modules() if hasattr(part, "lora_A")} == adapted
    head = step.trainable.head
    assert head is not None and head.layer is step.trainable.module.get_submodule("lm_head")


@pytest.mark.matrix(2)
@pytest.mark.parametrize("checkpointing", ["every_layer", "every_2_layers", "attention_saved", "offloaded"])
@pytest.mark.parametrize("model", ["gpt2-nano", "llama-nano"])
def test_the_adapters_of_checkpointed_layers_have_the_same_gradients(model: str, checkpointing: str) -> None:
    """Checkpoints that are not reentrant train the adapters of a layer whose inputs need no gradients, too."""
    settings = {**LORA, "model": model, "adapter_dropout": 0.1, "causal_lm__dropout": 0.1}
    assert losses(tiny(**settings, checkpointing=checkpointing)) == pytest.approx(losses(tiny(**settings)), rel=1e-5)


OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"adapter_weights": "bfloat16"},
    {"weights": "bfloat16"},
    {"adapter_targets": "attention"},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"max_grad_norm": None, "optimizer_in_backward": True},
    {"optimizer": "adafactor"},
    {"optimizer": "sgd"},
    {"optimizer": "muon"},
)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("model", "others"), pairs(["gpt2-nano", "llama-nano"], OTHERS))
def test_its_peak_is_predicted_where_the_weights_set_it(model: str, others: dict[str, Any]) -> None:
    wide = {**SMALL_BATCH, "model": model, "vocabulary_size": 300, "causal_lm__width": 96}
    peak = check_peak(tiny(adapter="lora", **wide, **others))
    without = {name: value for name, value in others.items() if "adapter" not in name}
    assert others.get("optimizer") in ("adafactor", "sgd") or peak < 0.8 * measured(tiny(**wide, **without))


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "others",
    [
        {"loss_kernel": "chunked"},
        {"loss_kernel": "fused"},
        {"checkpointing": "every_layer"},
        {"checkpointing": "attention_saved"},
        {"checkpointing": "offloaded"},
        {"activation_offloading": True, "offloading_min_mib": 0.01},
        {"attention": "eager"},
        {"gelu": "fused"},
        {"micro_batch_size": 2, "accumulation_steps": 4, "precision": "bf16"},
    ],
    ids=str,
)
def test_its_peak_is_predicted_with_other_levers(others: dict[str, Any]) -> None:
    shared: dict[str, Any] = {"sequence_length": 64, "eval_steps": 0, "adapter_dropout": 0.1, "causal_lm__dropout": 0.1}
    check_peak(tiny(adapter="lora", **shared, **others))


@pytest.mark.parametrize(("model", "targets"), [("gpt2-nano", "all,wte"), ("llama-nano", "lm_head,embed_tokens")])
def test_its_peak_is_predicted_with_adapters_of_head_and_embeddings(model: str, targets: str) -> None:
    experiment = tiny(adapter="lora", adapter_targets=targets, model=model, **SMALL_BATCH)
    check_peak(experiment, error_bytes=TRANSPOSED_BYTES)


def test_a_loss_without_logits_refuses_an_adapter_of_the_head() -> None:
    settings = {"adapter": "lora", "model": "llama-nano", "loss_kernel": "chunked"}
    reason = tiny(**settings, adapter_targets="all,lm_head").unsupported()
    assert (
        reason is not None and "the head has an adapter (adapter_targets=all,lm_head); set loss_kernel=full" in reason
    )
    assert tiny(**settings, adapter_targets="all").unsupported() is None


@pytest.mark.gpu
@pytest.mark.matrix(1)
@pytest.mark.parametrize("model", ["gpt2-nano", "llama-nano"])
@pytest.mark.parametrize(
    "others",
    [*OTHERS[:-3], {"precision": "bf16", "weights": "bfloat16", "checkpointing": "every_layer"}, {"optimizer": "muon"}],
    ids=str,
)
def test_its_peak_on_a_card_is_predicted(others: dict[str, Any], model: str, card: Any) -> None:
    shape = {"model": model, "causal_lm.num_layers": 4, "causal_lm.width": 256, "causal_lm.num_heads": 4}
    for batch in (SMALL_BATCH, {"micro_batch_size": 2, "accumulation_steps": 4, "adapter_dropout": 0.1}):
        settings = {**shape, "vocabulary_size": 4096, **batch, "sequence_length": 64, "adapter": "lora", **others}
        if others.get("optimizer_in_backward"):
            settings |= {"accumulation_steps": 1}
        check_peak_on_card(card, settings, error_of_reserved=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["hugging_face", "accelerate", "lightning", "deepspeed"])
def test_a_framework_trains_the_same(framework: str, tmp_path: Path) -> None:
    experiment = tiny(**LORA, micro_batch_size=2, effective_batch_size=8, checkpointing="every_layer")
    write_files(export_files(experiment), tmp_path)
    assert run_framework(framework, tmp_path) == pytest.approx(losses(experiment, 4), abs=1e-4)


def test_exports_have_it_in_python_and_say_so_of_json() -> None:
    files = export_files(tiny(**LORA))
    for name in ("train.py", "accelerate_setup.py", "lightning_trainer.py", "training_arguments.py"):
        assert "LoraConfig(" in files[name] and "r=4, lora_alpha=8, lora_dropout=0.0" in files[name]
        assert "without_frozen(torch.optim.AdamW(" in files[name]
    setting = "adapter=lora, adapter_rank=4, adapter_alpha=8"
    assert f"The JSON alone is without {setting}; make_trainer has it." in files["README.md"]
    assert f"deepspeed.json has no key for {setting}" in files["deepspeed.json"]
    assert "peft.get_peft_model_state_dict(model)" in files["README.md"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter_rank": 8}, "adapter_rank=8 is a setting of adapter=lora, and adapter is none; set adapter=lora or"),
        (
            {"adapter": "lora", "adapter_weights": "bfloat16", "precision": "fp16"},
            "needs no loss scaling, and precision=fp16 .* set precision=bf16 or fp32, or adapter_weights=float32",
        ),
        (
            {"adapter": "lora", "adapter_targets": "q_proj,c_attn"},
            "inside the layers of gpt2-nano, or some outside of them, and q_proj matches none of attn.c_attn, "
            "attn.c_proj, mlp.c_fc, mlp.c_proj, nor of transformer.wte, transformer.wpe, lm_head; set adapter_targets",
        ),
        ({"adapter": "lora", **with_corpus_of("encoder_stack")}, "they have none that .* set adapter=none"),
    ],
)
def test_what_has_no_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    reason = tiny(**changes).unsupported(CPU)
    assert reason is not None and re.search(message, reason)
    assert tiny(adapter="lora").unsupported(CPU) is tiny().unsupported(CPU) is None


def test_without_peft_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.techniques.adapter.find_spec", lambda _: None)
    reason = tiny(adapter="lora").unsupported(CPU)
    assert (
        reason is not None and "needs the package peft, which is not installed" in reason and "adapter=none" in reason
    )


@pytest.mark.parametrize(
    "changes",
    [{"adapter": "dora"}, {"adapter_rank": 0}, {"adapter_dropout": 1.0}, {"adapter_targets": "a,,b"}],
    ids=str,
)
def test_values_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(changes))):
        tiny(**changes)


class OwnLayer(nn.Module):
    """A layer of a user's own, with an attention of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = nn.MultiheadAttention(8, 2), nn.Linear(8, 16), nn.Linear(16, 8)


def test_linear_layers_whose_weights_torch_reads_itself_are_left_alone() -> None:
    assert list(linear_layers(OwnLayer())) == ["up", "down"]
    assert list(linear_layers(nn.TransformerEncoderLayer(8, 2))) == []


def test_an_answer_of_another_training_is_verified_beside_that_training() -> None:
    space = {"micro_batch_size": [2, 4], "adapter": ["none", "lora"], "checkpointing": ["none", "every_layer"]}
    settings = {**TINY, "budget": "1GiB", "effective_batch_size": 4, "space": space, "mathematics": "different"}
    problem = make_experiment_problem(settings)
    assert len(problem.space.choices) == len(list(product(*space.values())))
    answer = {"micro_batch_size": 2, "adapter": "lora", "checkpointing": "every_layer"}
    assert problem.baseline_beside(answer) == [
        {**answer, "micro_batch_size": n, "checkpointing": "none"} for n in (4, 2)
    ]


def test_the_held_out_loss_of_a_fine_tuning_is_the_same_at_every_cut_of_the_batch() -> None:
    """Random frozen weights leave adapters little to gain: it is held against the loss without training."""

    def held_out_loss(size: int, learning_rate: float = 1e-2) -> float:
        settings = {**LORA, "corpus": "chat", "sequences": "padded", "sequence_length": 64}
        cut = {"micro_batch_size": size, "accumulation_steps": 8 // size, "learning_rate": learning_rate}
        experiment, messages = tiny(**{**settings, **cut}, num_steps=16, eval_steps=2), list[Any]()
        train(experiment, experiment.prepare(), messages.append)
        assert isinstance(messages[-1], Finished) and messages[-1].eval_loss is not None
        return messages[-1].eval_loss

    whole, untrained = held_out_loss(8), held_out_loss(8, learning_rate=1e-12)
    gained = untrained - whole
    assert gained > 0.02
    for size in (4, 2, 1):
        difference = abs(held_out_loss(size) - whole)
        assert difference <= 1e-5 * whole
        assert difference < gained / 100, "else a cut that trained nothing would pass"
