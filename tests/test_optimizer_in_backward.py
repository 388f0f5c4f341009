"""The optimizer in the backward pass: fewer gradients, tied parameters once, and what clipping costs in memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import TINY, tiny
from test_prediction import CPU, measured

from pipeline.base.errors import InvalidInputError
from pipeline.jobs.plan import make_plan
from pipeline.planning.clipping import cost_of_clipping
from pipeline.prediction.predict import predict
from pipeline.runtime.worker_pool import WorkerError
from pipeline.searching.experiment_problem import make_experiment_problem
from pipeline.searching.setup import make_sampler
from pipeline.techniques.optimizer_in_backward import update_in_backward

SMALL_BATCH: dict[str, Any] = {"sequence_length": 8, "micro_batch_size": 2, "max_grad_norm": None}
"""Parameters, gradients and optimizer state are most of the peak."""


@pytest.mark.parametrize(("precision", "share"), [("fp32", 0.9), ("bf16", 1.0)])
def test_the_peak_has_few_gradients_at_a_time(precision: str, share: float) -> None:
    """With bf16 the peak is inside a matrix product, whose scratchpad of oneDNN no prediction has."""
    settings = {**SMALL_BATCH, "precision": precision}
    plain, early = tiny(**settings), tiny(**settings, optimizer_in_backward=True)
    peaks = [measured(plain), measured(early)]
    assert peaks[1] < share * peaks[0]
    error = 1e-4 if precision == "fp32" else 0.03
    assert predict(early, CPU).peak_allocated_bytes == pytest.approx(peaks[1], rel=error)


def test_a_parameter_that_is_used_twice_is_updated_once_with_the_whole_gradient() -> None:
    def trained(changed: bool) -> torch.Tensor:
        torch.manual_seed(0)
        shared, own = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        groups = [{"params": shared.parameters(), "lr": 0.1}, {"params": own.parameters(), "lr": 0.2}]
        optimizer: Any = torch.optim.AdamW(groups, fused=True)
        optimizer = update_in_backward(optimizer) if changed else optimizer
        for _ in range(3):
            shared(own(shared(torch.ones(2, 3)))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.flatten() for part in (shared, own) for parameter in part.parameters()])

    assert torch.equal(trained(True), trained(False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_grad_norm": 0.5}, "max_grad_norm is 0.5; set max_grad_norm=none, which is another training, or"),
        ({"accumulation_steps": 4}, "accumulation_steps is 4; set micro_batch_size=8 or"),
        ({"precision": "fp16"}, "precision is fp16; set precision=bf16 or"),
        ({"gradient_underflow": True}, "gradient_underflow is true, which reads all gradients; set"),
    ],
)
def test_another_training_is_refused(changes: dict[str, Any], message: str) -> None:
    reason = tiny(**{**SMALL_BATCH, "optimizer_in_backward": True, **changes}).unsupported(CPU)
    assert reason is not None and message in reason


def test_what_clipping_costs_is_said_where_it_can_be_avoided() -> None:
    small = {**SMALL_BATCH, "max_grad_norm": 1.0}
    clipped = [tiny(**small), tiny(**small, checkpointing="every_layer")]
    predicted = [(one, predict(one, CPU).peak_bytes) for one in clipped]
    least = min(peak for _, peak in predicted)
    sentence = cost_of_clipping(predicted, CPU, least - 1)
    assert sentence is not None and sentence.startswith("Clipping to max_grad_norm=1 keeps all gradients until")
    assert f"instead of {least / 2**20:,.1f} MiB, which fits" in sentence
    assert "which fits" not in str(cost_of_clipping(predicted, CPU, least // 2))
    assert cost_of_clipping([(tiny(**SMALL_BATCH), least)], CPU, least) is None, "it does not clip"
    in_parts = [(tiny(**{**small, "accumulation_steps": 2}), least)]
    assert cost_of_clipping(in_parts, CPU, least) is None, "it needs one micro-batch"


@pytest.mark.parametrize(("settings", "is_asked"), [({}, True), ({"adapter": "lora", "adapter_rank": 1}, False)])
def test_a_plan_asks_what_clipping_costs_where_gradients_take_memory(
    settings: dict[str, Any], is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.jobs.plan.cost_of_clipping", lambda *_: "asked")
    space = {"micro_batch_size": [2], "optimizer_in_backward": [False, True]}
    given = {**TINY, "sequence_length": 8, "effective_batch_size": 2, "budget": "1GiB", "gpu": "cpu", **settings}
    [card] = make_plan({**given, "space": space}).cards
    assert ("asked" in card.notes) is is_asked


def test_a_search_in_which_nothing_fits_says_what_clipping_costs() -> None:
    space = {"micro_batch_size": [2], "precision": ["fp32"], "checkpointing": ["none"]}
    given = {**TINY, "sequence_length": 8, "effective_batch_size": 2, "budget": "0.8MiB", "space": space}
    with pytest.raises(InvalidInputError, match=r"Clipping to max_grad_norm=1 keeps .* instead of \d\.\d MiB"):
        make_sampler(make_experiment_problem({**given, "num_steps": 10}))


def test_an_update_that_fails_leaves_the_optimizers_groups_as_they_were() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.step = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
    update_in_backward(optimizer)
    with pytest.raises(ZeroDivisionError):
        (parameters[0] + parameters[1]).sum().backward()
    assert optimizer.param_groups[0]["params"] == parameters


@pytest.mark.parametrize("raises", [True, False])
def test_an_error_of_the_prediction_without_clipping_costs_only_its_sentence(
    raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> Iterator[tuple[int, InvalidInputError]]:
        if raises:
            raise WorkerError("a worker process ended before its task was done")
        yield 0, InvalidInputError("predicting it raises RuntimeError: an operator without a fake implementation")

    monkeypatch.setattr("pipeline.planning.clipping.predict_each", failing)
    assert cost_of_clipping([(tiny(**{**SMALL_BATCH, "max_grad_norm": 1.0}), 2**20)], CPU, 2**20) is None
