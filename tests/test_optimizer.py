"""The optimizers: updates equal to those of a plain loop, the parameters of each, and what cannot be combined."""

import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import CPU, pairs, tiny, with_corpus_of
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon
from trainings import SMALL_BATCH as ONE_SHORT_SEQUENCE
from trainings import check_peak, check_peak_on_card, loop_of, losses, plainly_trained, trained

from pipeline.base.errors import InvalidInputError
from pipeline.base.technique import Stage
from pipeline.config.experiment import Experiment
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.techniques._support.optimizers import (
    adafactor_in_place_of,
    adamw_8bit_in_place_of,
    muon_in_place_of,
    sgd_in_place_of,
)
from pipeline.training.step import build_step

OTHERS = ("adamw_8bit", "adafactor", "sgd", "muon")
LARGEST_ERRORS = {"muon": 0.02}
"""Of predictions on a CPU: oneDNN's scratchpads, of which a model so small has much, are not predicted."""
NUM_STEPS = 5
EMBEDDING = re.compile(r"\bw[tp]e\b")
"""The names of GPT-2's embeddings."""
CUTS = {1: {"micro_batch_size": 8}, 4: {"micro_batch_size": 2, "accumulation_steps": 4}}
"""Settings by the number of micro-batches."""
SMALL_BATCH = {**ONE_SHORT_SEQUENCE, "vocabulary_size": 300, "causal_lm__width": 96, "encoder_stack__width": 96}
"""Parameters, gradients and optimizer state are most of the peak."""


def matrices(module: nn.Module) -> set[str]:
    """Return the names of the parameters of the blocks with two axes."""
    blocks = ("transformer.h.", "model.layers.", "0.", "1.")  # GPT-2's, Llama's, and of a stack of two layers
    return {name for name, part in module.named_parameters() if name.startswith(blocks) and part.ndim == 2}


def plain_optimizers(name: str, module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return torch's own optimizers, each in its simplest form."""
    names = matrices(module)
    of_blocks = [part for each, part in module.named_parameters() if each in names]
    others = [part for each, part in module.named_parameters() if each not in names]
    made: dict[str, Callable[[], list[torch.optim.Optimizer]]] = {
        "adamw_8bit": lambda: [plain_adamw_8bit(module)],
        "adafactor": lambda: [Adafactor(module.parameters(), weight_decay=0.01)],
        "sgd": lambda: [SGD(module.parameters(), momentum=0.9, weight_decay=0.01, foreach=False)],
        "muon": lambda: [
            Muon(of_blocks, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            AdamW(others, weight_decay=0.01, fused=True),  # bfloat16 inside Muon would amplify other round-off
        ],
    }
    return made[name]()


def plain_adamw_8bit(module: nn.Module) -> torch.optim.Optimizer:
    """Return bitsandbytes' optimizer, its state of embeddings in float32 in the way that transformers' Trainer does."""
    from bitsandbytes.optim import AdamW8bit, GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    optimizer: torch.optim.Optimizer = AdamW8bit(module.parameters(), weight_decay=0.01)
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            manager.register_module_override(part, "weight", {"optim_bits": 32})
    GlobalOptimManager._instance = None  # it is of this optimizer alone, not of the process
    return optimizer


def distance(found: Iterable[Tensor], expected: Iterable[Tensor], before: Iterable[Tensor]) -> float:
    """Return the largest relative difference of a parameter's change."""
    triples = zip(found, expected, before, strict=True)
    return max(float((a - b).norm() / (b - start).norm()) for a, b, start in triples)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("model", ["gpt2-nano", "encoder_stack"])
@pytest.mark.parametrize("num_micro_batches", CUTS)
@pytest.mark.parametrize("optimizer", OTHERS)
def test_updates_are_those_of_a_plain_loop(optimizer: str, num_micro_batches: int, model: str) -> None:
    shared = {"learning_rate": 1e-2, **with_corpus_of(model), **CUTS[num_micro_batches]}
    experiment = tiny(optimizer=optimizer, **shared)
    assert experiment.settings.accumulation_steps == num_micro_batches  # type: ignore[attr-defined]
    trainable, loop, _ = trained(experiment, NUM_STEPS)
    plain, *_ = plainly_trained(experiment, loop, NUM_STEPS, optimizers=partial(plain_optimizers, optimizer))
    torch.manual_seed(0)
    before = experiment.model.build(experiment.settings.model, experiment.prepare().vocabulary_size).module
    parameters = [[p.detach() for p in module.parameters()] for module in (trainable.module, plain, before)]
    assert distance(*parameters) < 1e-5
    with_adamw = trained(tiny(**shared), NUM_STEPS)[0].module
    least = 0.01 if optimizer == "adamw_8bit" else 0.1  # it rounds the state of AdamW
    assert distance([p.detach() for p in with_adamw.parameters()], *parameters[1:]) > least


@pytest.mark.parametrize("implementation", ["foreach", "loop"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_torch_is_told_the_implementation(optimizer: str, implementation: str) -> None:
    experiment = tiny(optimizer=optimizer, optimizer_implementation=implementation)
    step = build_step(experiment, experiment.prepare())
    group = step.make_optimizer(step.trainable.module).param_groups[-1]
    assert (group["fused"], group["foreach"]) == (False, implementation == "foreach")


def test_an_optimizer_without_implementations_refuses_them() -> None:
    reason = tiny(optimizer="adafactor", optimizer_implementation="foreach").unsupported(CPU)
    assert reason is not None and reason.endswith("set optimizer_implementation=fused, which changes nothing there")


@pytest.mark.parametrize("model", ["gpt2-nano", "llama-nano", "encoder_stack"])
def test_muon_has_the_matrices_of_the_blocks_alone(model: str) -> None:
    experiment = tiny(optimizer="muon", **with_corpus_of(model))
    step = build_step(experiment, experiment.prepare())
    muon, adamw = step.make_optimizer(step.trainable.module).param_groups
    names = {parameter: name for name, parameter in step.trainable.module.named_parameters()}
    by_muon, by_adamw = ({names[parameter] for parameter in group["params"]} for group in (muon, adamw))
    assert by_muon == matrices(step.trainable.module) and "ns_steps" in muon and adamw["fused"]
    assert by_muon | by_adamw == set(names.values()) and not by_muon & by_adamw
    assert model == "encoder_stack" or any("wte" in name or "embed_tokens" in name for name in by_adamw)


def test_muon_leaves_an_embedding_inside_a_layer_and_frozen_matrices_alone() -> None:
    layer = nn.ModuleDict({"positions": nn.Embedding(4, 3), "frozen": nn.Linear(3, 3), "trained": nn.Linear(3, 2)})
    layer["frozen"].requires_grad_(False)
    adamw = AdamW([part for part in layer.parameters() if part.requires_grad], lr=0.5, weight_decay=0.25, fused=True)
    optimizer = muon_in_place_of(adamw, [layer], momentum=0.9)
    muon, rest = optimizer.param_groups
    assert [id(part) for part in muon["params"]] == [id(layer["trained"].weight)]
    assert {id(part) for part in rest["params"]} == {id(layer["positions"].weight), id(layer["trained"].bias)}
    assert {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups} == {(0.5, 0.25)}


def test_muon_without_matrices_is_refused() -> None:
    experiment = tiny(optimizer="muon")
    step = build_step(tiny(), experiment.prepare())
    [technique] = [each for each in experiment.techniques if each.stage is Stage.OPTIMIZER]
    bare = replace(step, trainable=replace(step.trainable, layers=(nn.LayerNorm(4),)))
    with pytest.raises(InvalidInputError, match="the layers of this model have none; set optimizer=adamw"):
        technique.apply(bare)


@pytest.mark.parametrize("optimizer", OTHERS)
def test_an_update_in_the_backward_pass_is_the_same(optimizer: str) -> None:
    settings = {"optimizer": optimizer, "max_grad_norm": None, "micro_batch_size": 8}
    late, early = (trained(tiny(**settings, optimizer_in_backward=value), 5)[0].module for value in (False, True))
    for one, other in zip(late.parameters(), early.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("optimizer", OTHERS)
def test_a_restored_state_continues_the_training(optimizer: str) -> None:
    def made(weights: Tensor) -> tuple[nn.Linear, torch.optim.Optimizer]:
        layer = nn.Linear(3, 3)
        layer.load_state_dict({"weight": weights, "bias": torch.zeros(3)})
        adamw = AdamW(layer.parameters(), lr=0.1, fused=True)
        others = {
            "adamw_8bit": lambda one: adamw_8bit_in_place_of(one, [], is_paged=False),
            "adafactor": adafactor_in_place_of,
            "sgd": lambda one: sgd_in_place_of(one, 0.9),
        }
        return layer, others.get(optimizer, lambda one: muon_in_place_of(one, [layer]))(adamw)

    def update(layer: nn.Linear, own: torch.optim.Optimizer) -> None:
        layer(torch.arange(6.0).view(2, 3)).square().sum().backward()
        own.step()
        own.zero_grad()

    layer, own = made(torch.eye(3))
    update(layer, own)
    again, restored = made(layer.weight.detach().clone())
    again.load_state_dict(layer.state_dict())
    restored.load_state_dict(deepcopy(own.state_dict()))
    update(layer, own)
    update(again, restored)
    assert torch.equal(layer.weight, again.weight) and torch.equal(layer.bias, again.bias)


def test_muon_runs_a_closure_and_can_be_copied() -> None:
    layer = nn.Linear(3, 3)
    optimizer = deepcopy(muon_in_place_of(AdamW(layer.parameters(), fused=True), [layer], momentum=0.9))
    [copied, *_] = [part for group in optimizer.param_groups for part in group["params"]]
    before = copied.detach().clone()

    def closure() -> Tensor:
        loss = copied.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert optimizer.step(closure) == before.square().sum()
    assert not torch.equal(copied, before)


def test_the_momentum_of_sgd_survives_a_first_step_that_loss_scaling_skips() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer: Any = sgd_in_place_of(AdamW([parameter], lr=0.1, weight_decay=0.0, fused=True), 0.5)
    for infinite in (1.0, 0.0, 0.0):
        parameter.grad, optimizer.grad_scale, optimizer.found_inf = torch.ones(3), None, torch.tensor(infinite)
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 1 - 0.1 * (1 + 1.5)))


@pytest.mark.parametrize("optimizer", OTHERS)
def test_loss_scaling_trains_with_it(optimizer: str) -> None:
    """Its updates are those without scaling; a scale that makes infinite gradients skips the step."""

    def weights(module: nn.Module) -> Tensor:
        return torch.cat([part.detach().flatten() for part in module.parameters()])

    settings = {"optimizer": optimizer, "micro_batch_size": 2, "learning_rate": 1e-2}
    scaled, plain = (
        weights(trained(tiny(**settings, **more), NUM_STEPS)[0].module)
        for more in ({"precision": "fp16", "initial_loss_scale": 1024.0}, {})
    )
    untrained = weights(loop_of(tiny(**settings))[0].trainable.module)
    assert float((scaled - plain).norm() / (plain - untrained).norm()) < 0.05
    records: list[Any] = []
    step, loop = loop_of(tiny(**settings, precision="fp16", initial_loss_scale=2.0**120), records.append)
    before = [part.detach().clone() for part in step.trainable.module.parameters()]
    loop.advance(1)
    assert records[0].skipped
    for one, other in zip(before, step.trainable.module.parameters(), strict=True):
        assert torch.equal(one, other)


def states(experiment: Experiment) -> dict[str, set[torch.dtype]]:
    """Return the types of the moments of each parameter after some optimizer steps, by its name."""
    trainable, loop, _ = trained(experiment, NUM_STEPS)
    names = {parameter: name for name, parameter in trainable.module.named_parameters()}
    kept = loop.optimizer.state.items()
    return {names[part]: {value[name].dtype for name in ("state1", "state2")} for part, value in kept}


@pytest.mark.parametrize("more", [{}, {"adapter": "lora"}, {"weights": "bfloat16"}], ids=str)
@pytest.mark.parametrize("embeddings", ["float32", "8bit"])
def test_the_state_of_8_bits_is_that_of_large_parameters(embeddings: str, more: dict[str, Any]) -> None:
    """Those of 4,096 elements or more; embeddings are exceptions if the setting says so."""
    experiment = tiny(optimizer="adamw_8bit", adamw_8bit_embeddings=embeddings, causal_lm__width=64, **more)
    module = build_step(experiment, experiment.prepare()).trainable.module
    expected = {}
    for name, parameter in module.named_parameters():
        is_large = parameter.numel() >= 4096 and (embeddings == "8bit" or not EMBEDDING.search(name))
        if parameter.requires_grad:
            expected[name] = {torch.uint8 if is_large else torch.float32}
    assert states(experiment) == expected
    assert {torch.uint8} in expected.values() and {torch.float32} in expected.values()


def test_losses_do_not_depend_on_the_cut_of_the_batch() -> None:
    """Quantized states round alike."""
    settings = {"optimizer": "adamw_8bit", "learning_rate": 1e-3, "num_steps": 30}
    whole, cut = (losses(tiny(**settings, **each), 30) for each in CUTS.values())
    assert whole == pytest.approx(cut, rel=1e-5)
    assert whole[-1] < whole[0] - 0.3


@pytest.mark.slow
def test_paged_state_is_no_memory_of_the_allocator() -> None:
    """On a card it is in managed memory, but for parameters below 100,000 elements, and the maps of its numbers."""
    large = {"causal_lm__width": 256, "causal_lm__num_heads": 4, "vocabulary_size": 300, "max_grad_norm": None}
    experiment, paged = (tiny(optimizer=name, **large) for name in ("adamw_8bit", "paged_adamw_8bit"))
    module = build_step(experiment, experiment.prepare()).trainable.module
    sizes = [part.numel() for name, part in module.named_parameters() if not EMBEDDING.search(name)]
    peaks = [
        predict(one, find_hardware("t4")).breakdown.category_bytes["optimizer state"] for one in (experiment, paged)
    ]
    assert peaks[0] - peaks[1] == 2 * sum(size for size in sizes if size >= 100_000) > 0
    works = [predict(one, find_hardware("t4")).update_work for one in (experiment, paged)]
    assert works[0] == works[1]  # what is paged is read and written too
    [unseen] = paged.notes(find_hardware("t4"))
    assert "CUDA's managed memory" in unseen and experiment.notes(find_hardware("t4")) == ()


def test_what_8_bit_adamw_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny(optimizer="paged_adamw_8bit").unsupported(CPU) == (
        "optimizer=paged_adamw_8bit keeps its state in CUDA's managed memory, and the device is a CPU; set "
        "optimizer=adamw_8bit, or device=cuda"
    )
    assert tiny(optimizer="paged_adamw_8bit").unsupported(find_hardware("t4")) is None
    monkeypatch.setattr("pipeline.techniques.optimizer.find_spec", lambda name: None)
    assert tiny(optimizer="adamw_8bit").unsupported(CPU) == (
        "optimizer=adamw_8bit needs the package bitsandbytes, which is not installed; install it (pip install "
        "'.[finetune]' in the checkout), or set optimizer=adamw"
    )
    assert tiny(optimizer="sgd").unsupported(CPU) is None


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("model", "more"),
    pairs(["gpt2-nano", "encoder_stack"], [{}, {"precision": "bf16"}, {"optimizer_in_backward": True}]),
)
@pytest.mark.parametrize("optimizer", OTHERS)
def test_its_peak_is_predicted_where_the_state_is_most_of_it(optimizer: str, model: str, more: dict[str, Any]) -> None:
    shared = {**SMALL_BATCH, **with_corpus_of(model), "max_grad_norm": None, **more}
    peak = check_peak(tiny(optimizer=optimizer, **shared), LARGEST_ERRORS.get(optimizer, 1e-4))
    assert peak < 0.9 * predict(tiny(**shared), CPU).peak_allocated_bytes


@pytest.mark.matrix(2)
@pytest.mark.parametrize("optimizer", OTHERS)
def test_its_peak_is_predicted_with_loss_scaling(optimizer: str) -> None:
    check_peak(tiny(**SMALL_BATCH, optimizer=optimizer, precision="fp16"), LARGEST_ERRORS.get(optimizer, 1e-4))


@pytest.mark.matrix(2)
@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"precision": "fp16"}, {"optimizer_in_backward": True}], ids=str)
@pytest.mark.parametrize("optimizer", [*OTHERS, "paged_adamw_8bit"])
def test_its_peak_on_a_card_is_predicted_where_the_state_is_most_of_it(
    optimizer: str, more: dict[str, Any], card: Any
) -> None:
    model = {"model": "gpt2-nano", "causal_lm.num_layers": 4, "causal_lm.width": 256, "causal_lm.num_heads": 4}
    batch = {"sequence_length": 16, "micro_batch_size": 1, "effective_batch_size": 1, "max_grad_norm": None}
    settings = {**model, **batch, "vocabulary_size": 4096, "optimizer": optimizer, **more}
    check_peak_on_card(card, settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sgd_momentum": 0.5},
            "sgd_momentum=0.5 is a setting of optimizer=sgd, and optimizer is adamw; set optimizer=sgd or",
        ),
        ({"adamw_8bit_embeddings": "8bit"}, "set optimizer=adamw_8bit or adamw_8bit_embeddings=float32"),
        ({"optimizer": "sgd", "muon_momentum": 0.5}, "set optimizer=muon or muon_momentum=0.95"),
        ({"optimizer": "sgd", "accumulation_steps": 4, "optimizer_in_backward": True}, "max_grad_norm"),
    ],
)
def test_a_combination_without_a_meaning_is_refused(changes: dict[str, Any], message: str) -> None:
    reason = tiny(**changes).unsupported(CPU)
    assert reason is not None and message in reason


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "adam"}, {"sgd_momentum": 1.0}, {"adafactor_beta2_decay": 0.5}, {"adafactor_clipping": 0.5}],
    ids=str,
)
def test_values_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(changes))):
        tiny(**changes)
