"""Pairs of answers: losses and gradients of DPO and of reward models, what is trained of real rows, predicted peaks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, DIVISIBLE, tiny
from torch import Tensor, nn
from trainings import check_peak, losses

from pipeline.base.contracts import Batch
from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment
from pipeline.config.settings import in_use
from pipeline.data._support.chat_template import trained_chat_template
from pipeline.data._support.conversations import read_pair
from pipeline.data._support.sequences import IGNORED_LABEL
from pipeline.data._support.shapes import Reading
from pipeline.export.write import export_files
from pipeline.prediction.predict import predict
from pipeline.training.step import backpropagate, build_step

NUM_ROWS = 24
TASKS = ("dpo", "reward")


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rows(shape: str) -> list[dict[str, Any]]:
    """Return preference pairs as public data have them; answers differ in length."""
    found = []
    for number in range(NUM_ROWS):
        question, good, bad = f"Question {number}?", "Yes. " * (1 + number % 3), "No. " * (1 + number % 4)
        asked, chosen, rejected = turn("user", question), turn("assistant", good), turn("assistant", bad)
        earlier = [turn("user", "Hello"), turn("assistant", "Hi"), asked]
        found.append(
            {
                "text": {"prompt": question, "chosen": good, "rejected": bad},
                "messages": {"prompt": [asked], "chosen": [chosen], "rejected": [rejected]},
                "whole": {"chosen": [*earlier, chosen], "rejected": [*earlier, rejected]},
                "turns": {"conversations": [asked], "chosen": chosen, "rejected": rejected},
            }[shape]
        )
    return found


def pairs(folder: Path, shape: str = "messages", **more: Any) -> dict[str, Any]:
    """Write pairs to a file, and return the settings that train on them."""
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows(shape))))
    return {"corpus": "chat", "chat__path": str(path), "sequences": "padded", **more}


@pytest.fixture
def experiment_on(tmp_path: Path) -> Any:
    def make(task: str, **more: Any) -> Experiment:
        return tiny(task=task, **pairs(tmp_path), **{f"{task}__num_layers": 2, f"{task}__width": 32}, **more)

    return make


def log_probability(module: nn.Module, ids_T: Tensor, labels_T: Tensor) -> Tensor:
    """Return the log-probability of an answer, token by token."""
    logits_TV = module(input_ids=ids_T[None]).logits[0].float()
    places = [place for place in range(1, len(ids_T)) if labels_T[place] != IGNORED_LABEL]
    return torch.stack([logits_TV[place - 1].log_softmax(-1)[ids_T[place]] for place in places]).sum()


def plain_loss(task: str, module: nn.Module, reference: nn.Module | None, batch: Batch) -> Tensor:
    """Return the mean loss of the pairs, by the formulas of the papers, one answer after the other without padding."""
    found = []
    for ids_2T, labels_2T in zip(batch["input_ids"], batch["labels"], strict=True):
        values = []
        for ids_T, labels_T in zip(ids_2T, labels_2T, strict=True):
            end = int((labels_T != IGNORED_LABEL).nonzero().max()) + 1
            if task == "reward":
                hidden_TC = module.transformer(input_ids=ids_T[None, :end]).last_hidden_state[0]  # type: ignore[operator]
                values.append(module.score(hidden_TC[-1])[0])  # type: ignore[operator]
                continue
            values.append(log_probability(module, ids_T[:end], labels_T[:end]))
            if reference is not None:
                values[-1] = values[-1] - log_probability(reference, ids_T[:end], labels_T[:end]).detach()
        beta = 0.3 if task == "dpo" else 1.0
        found.append(-F.logsigmoid(beta * (values[0] - values[1])))
    return torch.stack(found).mean()


@pytest.mark.parametrize(
    ("task", "reference", "adapter"),
    [("dpo", True, "none"), ("dpo", False, "none"), ("dpo", True, "lora"), ("reward", False, "none")],
)
def test_loss_and_gradients_are_those_of_the_formula(
    task: str, reference: bool, adapter: str, experiment_on: Any
) -> None:
    """Of any micro-batch; the model has moved from where its reference stays."""
    more: dict[str, Any] = {"dpo__beta": 0.3} if task == "dpo" else {}
    more |= {} if reference or task != "dpo" else {"reference": "none"}
    sums = []
    for size in (8, 2):
        experiment = experiment_on(task, micro_batch_size=size, accumulation_steps=8 // size, adapter=adapter, **more)
        prepared = experiment.prepare()
        torch.manual_seed(0)
        step = build_step(experiment, prepared)
        module = step.trainable.module
        before = experiment.model.build("gpt2-nano", prepared.vocabulary_size).module
        frozen = {name.replace(".base_layer", ""): value for name, value in module.state_dict().items()}
        before.load_state_dict(frozen, strict=False)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in (each for each in module.parameters() if each.requires_grad):
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        expected = plain_loss(task, module, before if reference else None, prepared.train.batch(range(8)))
        trained = [each for each in module.parameters() if each.requires_grad]
        gradients = torch.autograd.grad(expected, trained)
        batches = prepared.train.micro_batches(range(8), size)
        num_pairs = sum(prepared.train.count(batch)[1] for batch in batches)
        assert num_pairs == 8
        sums.append(backpropagate(step, batches, num_pairs))
        assert sums[-1].item() == pytest.approx(expected.item(), rel=1e-5)
        assert expected.item() != pytest.approx(math.log(2), abs=1e-3), "the model has moved"
        for parameter, gradient in zip(trained, gradients, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)
        assert all(part.training for part in module.modules())
    assert sums[0].item() == pytest.approx(sums[1].item(), rel=1e-5)


@pytest.mark.parametrize("shape", ["text", "messages", "whole", "turns"])
def test_the_answers_that_differ_are_targets(shape: str, tmp_path: Path) -> None:
    experiment = tiny(task="dpo", **pairs(tmp_path, shape))
    train = experiment.prepare().train
    assert len(train) == NUM_ROWS - round(NUM_ROWS / 10)
    talks = [each.messages for row in rows(shape) for each in read_pair(row, Reading(needs_pairs=True))]
    tokenizer = trained_chat_template(talks, 512).tokenizer
    batch, written = train.batch(range(len(train))), set()
    for ids_2T, labels_2T in zip(batch["input_ids"], batch["labels"], strict=True):
        texts = [
            tokenizer.decode(ids_T[labels_T != IGNORED_LABEL])
            for ids_T, labels_T in zip(ids_2T, labels_2T, strict=True)
        ]
        written.add(tuple(text.strip().removesuffix("<|im_end|>").strip() for text in texts))
        assert "Question" in tokenizer.decode(ids_2T[0]) and "Question" in tokenizer.decode(ids_2T[1])
    answers = {(("Yes. " * (1 + n % 3)).strip(), ("No. " * (1 + n % 4)).strip()) for n in range(NUM_ROWS)}
    assert written <= answers and len(written) > 6
    assert train.count(batch)[1] == len(train)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("more", [{}, {"adapter": "lora"}, {"corpus": "python_docs", "sequences": "packed"}])
def test_its_peak_is_predicted(task: str, more: dict[str, Any], tmp_path: Path) -> None:
    settings = {**pairs(tmp_path), "task": task, "micro_batch_size": 4, "eval_steps": 0, **more}
    settings = {name: value for name, value in settings.items() if name != "chat__path" or settings["corpus"] == "chat"}
    check_peak(tiny(**settings, accumulation_steps=2))


def test_a_model_without_a_reference_needs_less(tmp_path: Path) -> None:
    settings = {**pairs(tmp_path), "task": "dpo", "micro_batch_size": 1, "eval_steps": 0}
    peaks = [predict(tiny(**settings, **more), CPU).peak_allocated_bytes for more in ({}, {"reference": "none"})]
    module = tiny(**settings).model.build("gpt2-nano", 512).module
    weights = sum(each.numel() * 4 for each in module.parameters())
    assert peaks[0] - peaks[1] == pytest.approx(weights, rel=0.02)


@pytest.mark.parametrize("task", TASKS)
def test_training_on_pairs_learns_them(task: str, experiment_on: Any) -> None:
    found = losses(
        experiment_on(task, micro_batch_size=4, learning_rate=3e-3, learning_rate_warmup_steps=0, num_steps=12), 12
    )
    assert found[0] == pytest.approx(math.log(2), abs=0.1 if task == "reward" else 1e-5)
    assert found[-1] < 0.9 * found[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"sequences": "packed"},
            "each answer of a pair is a sequence .* set sequences=padded, grouped or fixed_length",
        ),
        ({"corpus": "python_docs", "sequences": "grouped"}, "makes pairs of sequences of one length.* or corpus=chat"),
        ({"chat__path": None}, r"have no pair of answers \(chosen and rejected\)"),
    ],
)
def test_what_has_no_pairs_is_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tiny(task="dpo", **{**pairs(tmp_path), **more}).prepare()


def test_a_reference_is_of_dpo_alone_and_is_not_divided(tmp_path: Path) -> None:
    reason = tiny(reference="none").unsupported()
    assert reason is not None and "is a setting of task=dpo" in reason
    assert "reference" in in_use(tiny(task="dpo").params()) and "reference" not in in_use(tiny(task="reward").params())
    sharded = tiny(task="dpo", sharding="fsdp", world_size=2, **pairs(tmp_path)).unsupported()
    assert sharded is not None and "the frozen copy of task=dpo; set adapter=lora" in sharded
    divided = tiny(task="dpo", **DIVISIBLE, tensor_parallel=2, world_size=2, **pairs(tmp_path)).unsupported()
    assert divided is not None and "the frozen copy of task=dpo; set reference=none" in divided
    with pytest.raises(InvalidInputError, match="is trained for dpo on pairs"):
        export_files(tiny(task="dpo", **pairs(tmp_path)))
