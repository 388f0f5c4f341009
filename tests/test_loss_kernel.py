"""The loss without all logits: the same values and gradients, which models it suits, and what is refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import OWN, TINY, no_synchronization, tiny, with_corpus_of
from test_prediction import CPU, measured
from torch import Tensor, nn
from transformers import AutoConfig

from pipeline.base.contracts import Trainable
from pipeline.base.errors import InvalidInputError
from pipeline.cli import main
from pipeline.config.experiment import Experiment
from pipeline.config.given import merged, validate
from pipeline.config.settings import AllSettings
from pipeline.models._support.causal_models import PRESETS
from pipeline.models._support.heads import head_of, hidden_states, why_inseparable
from pipeline.models.causal_lm import CausalLm
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.techniques._support.loss_kernels import chunked_cross_entropy
from pipeline.techniques.loss_kernel import LONGEST_CHUNK_TOKENS, LossKernel, default_chunk_tokens, has_fused
from pipeline.training.step import build_step

N, C, V = 50, 16, 70
H200 = find_hardware("h200")
Gradients = tuple[float, list[Tensor]]
needs_fused = pytest.mark.skipif(not has_fused(), reason="needs another version of torch")


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, bias and targets, of which every fifth is ignored."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(N, C), torch.randn(V, C), torch.randn(V)
    targets = torch.randint(0, V, (N,))
    targets[::5] = -100
    return (*(part.to(dtype).requires_grad_() for part in (hidden, weight, bias)), targets)  # type: ignore[return-value]


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None = None) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = logits.float() if logits.dtype != torch.float64 else logits
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def gradients_of(loss: Tensor, *parts: Tensor | None, factor: float = 0.01) -> Gradients:
    """Return the value of a loss, and the gradients of `factor` times the loss as float64."""
    found = torch.autograd.grad(factor * loss, [part for part in parts if part is not None])
    return loss.item(), [gradient.double() for gradient in found]


@pytest.mark.parametrize("chunk", [1, 7, 25, N])
@pytest.mark.parametrize("cap", [None, 2.0], ids=["", "capped"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_values_and_gradients_are_those_of_the_cross_entropy(chunk: int, cap: float | None, has_bias: bool) -> None:
    hidden, weight, bias, targets = tensors(torch.float32)
    parts = (hidden, weight, bias if has_bias else None)
    value, found = gradients_of(chunked_cross_entropy(*parts, targets, chunk, cap), *parts)
    exact = tuple(None if part is None else part.detach().double().requires_grad_() for part in parts)
    expected, truth = gradients_of(plain(*exact, targets, cap), *exact)  # type: ignore[arg-type]
    assert value == pytest.approx(expected, rel=1e-6)
    for gradient, true in zip(found, truth, strict=True):
        assert (gradient - true).norm() <= 1e-6 * true.norm()


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1 / 37), (torch.float16, 2**16 / 37)])
def test_under_autocast_many_chunks_are_as_exact_as_the_plain_loss(dtype: torch.dtype, factor: float) -> None:
    """Were the head's gradient summed in 16 bits, 25 chunks would be several times less exact."""
    hidden, weight, _, targets = tensors(torch.float32)
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    expected, truth = gradients_of(plain(*exact, None, targets), *exact, factor=factor)
    with torch.autocast("cpu", dtype=dtype):
        chunked = chunked_cross_entropy(hidden, weight, None, targets, 2, factor=factor)
        losses = plain(hidden, weight, None, targets), chunked
    (_, rounded), (value, found) = (gradients_of(loss, hidden, weight, factor=factor) for loss in losses)
    assert value == pytest.approx(expected, rel=1e-3)
    for gradient, other, true in zip(found, rounded, truth, strict=True):
        assert (gradient - true).norm() <= 1.2 * (other - true).norm()


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, _, targets = tensors(torch.float32)
    loss = chunked_cross_entropy(hidden, weight.detach(), None, targets, 10)
    [gradient] = torch.autograd.grad(loss, [hidden])
    assert gradient.shape == hidden.shape
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, None, targets, 10).requires_grad


def test_large_logits_do_not_overflow_and_ignored_targets_count_nothing() -> None:
    hidden, weight = torch.full((4, 2), 1e3, requires_grad=True), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    targets = torch.tensor([0, 1, -100, -100])
    assert chunked_cross_entropy(hidden, weight, None, targets, 3).item() == pytest.approx(4000)
    assert chunked_cross_entropy(hidden, weight, None, torch.full((4,), -100), 3).item() == 0


def test_a_default_chunk_has_as_many_logits_as_the_head_has_weights() -> None:
    assert [default_chunk_tokens(width) for width in (128, 768, 4096)] == [128, 768, LONGEST_CHUNK_TOKENS]


def test_hidden_states_come_from_the_whole_model_which_is_left_as_it_was() -> None:
    experiment = tiny()
    prepared = experiment.prepare()
    trainable = experiment.model.build(experiment.settings.model, prepared.vocabulary_size)
    batch, head = prepared.train.batch([0, 1]), trainable.head
    assert head is not None and "forward" not in vars(head.layer)
    hidden = hidden_states(head, trainable.module.eval(), batch)
    assert "forward" not in vars(head.layer)
    torch.testing.assert_close(head.layer(hidden), head.logits(trainable.module, batch))


@pytest.mark.parametrize("name", PRESETS)
def test_the_head_of_every_preset_is_separable(name: str) -> None:
    assert CausalLm().inseparable_head(name, False) is None
    assert why_inseparable(name, CausalLm(num_layers=1).structure(name), False) is None


KINDS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "num_key_value_heads": 1, "intermediate_size": 64},
    "gptj": {"rotary_dim": 8},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "cohere": {},
    "granite": {"logits_scaling": 2.0},
}
"""Soft-capped logits, a head with a bias, a projection before the head, and logits that are multiplied after it."""


def folder_of(kind: str, folder: Path) -> str:
    """Write the configuration of a tiny model of this kind, and return the folder."""
    shape = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(kind, **{**shape, **tokens, **KINDS[kind]})
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return str(folder)


def experiment_on(name: str, **changes: Any) -> Experiment:
    shape = dict.fromkeys(("num_layers", "width", "num_heads"))
    batch = {"micro_batch_size": 8, "accumulation_steps": 1, "effective_batch_size": 8, "eval_steps": 0}
    return Experiment(validate(AllSettings, merged(TINY, {"model": name, "causal_lm": shape, **batch, **changes}), ""))


@pytest.mark.parametrize("kind", ["gemma2", "gptj", "opt"])
def test_a_model_of_another_kind_has_the_same_loss_and_gradients(kind: str, tmp_path: Path) -> None:
    name = folder_of(kind, tmp_path)
    found = []
    for settings in ({}, {"loss_kernel": "chunked", "loss_chunk_tokens": 40}):
        experiment = experiment_on(name, **settings)
        assert experiment.unsupported(CPU) is None
        prepared = experiment.read_corpus()
        torch.manual_seed(0)
        step = build_step(experiment, prepared)
        module = step.trainable.module.eval()
        loss = step.trainable.loss(module, prepared.train.batch(range(8)), 100)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.item(), torch.cat([part.grad.flatten() for part in module.parameters()])))
    (expected, truth), (value, gradient) = found
    assert value == pytest.approx(expected, rel=1e-6)
    assert (gradient - truth).norm() <= 1e-5 * truth.norm()


@pytest.mark.parametrize("kind", ["cohere", "granite"])
def test_a_model_that_changes_its_logits_is_refused(kind: str, tmp_path: Path) -> None:
    reason = experiment_on(folder_of(kind, tmp_path), loss_kernel="chunked").unsupported(CPU)
    assert reason is not None and "changes its logits after its head" in reason and "set loss_kernel=full" in reason


@needs_fused
def test_soft_capped_logits_are_refused_where_the_kernel_cannot_cap_them(tmp_path: Path) -> None:
    name = folder_of("gemma2", tmp_path)
    reason = experiment_on(name, loss_kernel="fused").unsupported(CPU)
    assert reason is not None and "caps its logits at 30" in reason and "set loss_kernel=full" in reason


def test_a_peak_with_soft_capped_logits_is_predicted(tmp_path: Path) -> None:
    experiment = experiment_on(folder_of("gemma2", tmp_path), loss_kernel="chunked", loss_chunk_tokens=50)
    prepared = tiny().read_corpus()
    predicted = predict(experiment, CPU, prepared).peak_allocated_bytes
    assert predicted == pytest.approx(measured(experiment, prepared), rel=1e-4)


class Sliced(nn.Module):
    """A model with more rows in its head than it returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(ids))
        return logits[..., :6]


def test_a_model_that_drops_logits_is_refused() -> None:
    module = Sliced()
    head = head_of(module, lambda module, batch: module(batch["input_ids"]))
    trainable = Trainable(module=module, layers=(), loss=lambda *_: torch.zeros(()), head=head)
    assert "changes its logits" in str(why_inseparable("it", trainable, soft_cap=True))


def test_a_model_of_the_users_own_names_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny(**OWN, loss_kernel="chunked").unsupported() is None
    from experiments.examples.own import Decoder

    monkeypatch.delattr(Decoder, "get_output_embeddings")
    own = {"model": "tests.test_loss_kernel:build_without_head", "corpus": OWN["corpus"]}
    reason = tiny(**own, loss_kernel="chunked").unsupported()
    assert reason is not None and "give it a method get_output_embeddings()" in reason


def build_without_head(vocabulary_size: int) -> nn.Module:
    """Build the example's model, from which the test has removed the method that names its head."""
    from experiments.examples.own import Decoder

    return Decoder(vocabulary_size)


def build_with_own_loss(vocabulary_size: int) -> Trainable:
    """Build the example's model with a loss of the user's own."""
    module = build_without_head(vocabulary_size)
    return Trainable(module=module, layers=tuple(module.blocks), loss=lambda *_: torch.zeros(()))  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", ["chunked", "liger"])
@pytest.mark.parametrize(
    "settings",
    [with_corpus_of("encoder_stack"), {"model": f"{__name__}:build_with_own_loss", "corpus": OWN["corpus"]}],
    ids=["encoder", "own"],
)
def test_a_loss_that_is_not_the_heads_is_refused(kernel: str, settings: dict[str, Any]) -> None:
    run = tiny(**settings)
    refusals = LossKernel(loss_kernel=kernel).refusals(run.settings, H200, run.model)  # type: ignore[arg-type]
    reason = list(refusals)[-1]  # of liger, that its package is absent comes first
    assert "is its own" in reason and reason.endswith("set loss_kernel=full")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_chunk_tokens": 8}, "loss_chunk_tokens is a setting of loss_kernel chunked and fused"),
        (
            {"loss_kernel": "chunked", "loss_chunk_tokens": 65, "micro_batch_size": 2},
            "65 is more than 2 sequences x 32 tokens; set loss_chunk_tokens=64 or less, or none",
        ),
        ({"loss_kernel": "fused", "precision": "bf16"}, "needs precision=fp32 or tf32"),
        ({"loss_kernel": "liger"}, "needs a CUDA GPU, and the device is cpu; set loss_kernel=chunked"),
    ],
    ids=["no chunks", "too large", "16 bits", "no GPU"],
)
def test_what_a_run_cannot_have_is_refused_in_a_line(
    settings: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    experiment = tiny(**settings)
    assert message in str(experiment.unsupported(CPU))
    with pytest.raises(InvalidInputError) as refused:
        predict(experiment, CPU)
    assert str(refused.value) == experiment.unsupported(CPU), "with the remedy of the reason alone"
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    given = ["--model", "gpt2-nano", "--device", "cpu", "--sequence_length", "32", "--output", str(tmp_path)]
    assert main(["main", *given, *words]) == 2
    assert message in capsys.readouterr().err


def test_what_a_device_or_a_version_lacks_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LossKernel.values_to_try("loss_kernel", H200)[:2] == ("full", "chunked")
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    assert LossKernel.values_to_try("loss_kernel", H200) == ("full", "chunked")
    assert "install torch 2.13" in str(tiny(loss_kernel="fused").unsupported(H200))
    monkeypatch.setattr("pipeline.techniques.loss_kernel.find_spec", lambda _: None)
    assert "package liger-kernel, which is not installed" in str(tiny(loss_kernel="liger").unsupported(H200))
    monkeypatch.setattr("pipeline.techniques.loss_kernel.find_spec", lambda _: object())
    assert tiny(loss_kernel="liger").unsupported(H200) is None


def test_no_logits_are_stored_and_the_peak_falls_by_them() -> None:
    """The plain step has three float32 copies of all logits; in chunks, one of the logits of a chunk."""
    large = {"model": "gpt2", "sequence_length": 1024, "micro_batch_size": 8, "causal_lm__dropout": 0.0}
    shape = {"causal_lm__num_layers": 2, "causal_lm__width": 768, "causal_lm__num_heads": 12}
    full, chunked = (predict(tiny(**large, **shape, loss_kernel=kernel), CPU) for kernel in ("full", "chunked"))
    logits_bytes = 8 * 1024 * 50257 * 4
    assert full.peak_bytes - chunked.peak_bytes > 2.5 * logits_bytes
    assert chunked.pass_work.flops == full.pass_work.flops


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["chunked", pytest.param("fused", marks=needs_fused)])
def test_the_loss_does_not_wait_for_the_gpu(kernel: str) -> None:
    experiment = tiny(**OWN, device="cuda", loss_kernel=kernel)
    prepared = experiment.prepare()
    step = build_step(experiment, prepared)
    batch = {name: part.to("cuda") for name, part in prepared.train.batch(range(8)).items()}
    for _ in range(2):  # the first one initializes libraries
        with no_synchronization():
            step.trainable.loss(step.trainable.module, batch, 100).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("raised", [AssertionError, ValueError, IndexError, AttributeError])
def test_a_model_that_raises_without_values_is_refused(raised: type[Exception]) -> None:
    module = Sliced()

    def logits(*_: object) -> Tensor:
        raise raised

    trainable = Trainable(module=module, layers=(), loss=lambda *_: torch.zeros(()), head=head_of(module, logits))
    reason = why_inseparable("it", trainable, soft_cap=True)
    assert reason is not None and raised.__name__ in reason and "let its forward method take them" in reason


def test_a_head_that_computes_something_else_is_none() -> None:
    class Scaled(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return 2 * super().forward(hidden)

    module = Sliced()
    assert head_of(module, None) is not None
    module.head = Scaled(4, 8)
    assert head_of(module, None) is None


def exported_names() -> dict[str, Any]:
    """Return what the exported code of the chunked loss defines."""
    code = LossKernel(loss_kernel="chunked", loss_chunk_tokens=7).export("lightning")
    assert code is not None
    names: dict[str, Any] = {"torch": torch}
    exec(code.code, names)
    return names


def test_the_exported_loss_hands_the_models_other_inputs_over_and_restores_its_head() -> None:
    experiment = tiny(causal_lm__dropout=0.0)
    module = experiment.model.build("gpt2-nano", 64).module.eval()
    head: Any = module.get_output_embeddings()  # type: ignore[operator]
    own = head.forward = partial(head.forward)  # as a library's hook
    ids_BT = torch.randint(0, 64, (2, 9))
    given = {"labels": ids_BT, "position_ids": torch.arange(9).flip(0)[None], "use_cache": False}
    given["attention_mask"] = (torch.arange(9) >= torch.tensor([[0], [4]])).long()
    expected = module(ids_BT, **given).loss
    exported_names()["compute_loss_without_logits"](module)
    assert module(ids_BT, **given).loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert head.forward is own


def test_the_exported_loss_keeps_small_gradients_in_fp16() -> None:
    """Without the loss scale, a gradient that is divided by many targets is zero in fp16."""
    module = tiny(causal_lm__dropout=0.0).model.build("gpt2-nano", 64).module.eval()
    loss_of, ids_BT, num_targets, found = (
        exported_names()["summed_loss_without_logits"],
        torch.ones(2, 9).long(),
        1e6,
        [],
    )
    for scale in (1.0, 2.0**16):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(module, ids_BT, ids_BT, torch.tensor(scale / num_targets)) / num_targets
        (scale * loss).backward()
        gradient = module.get_output_embeddings().weight.grad / scale  # type: ignore[operator]
        found.append(int((gradient != 0).sum()))
        module.zero_grad()
    assert found[0] < found[1]
