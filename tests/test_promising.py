"""Among the configurations that are simulated is the fastest one that fits, in a space whose amounts are made up."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.memory.breakdown import Breakdown
from pipeline.memory.work import Work
from pipeline.planning import promising
from pipeline.planning.expectation import Vector
from pipeline.planning.rates import cost_prior
from pipeline.planning.step_time import estimated
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.prediction import Prediction

RTX4090 = find_hardware("rtx4090")
BATCH = 64
SPACE: dict[str, list[Any]] = {
    "micro_batch_size": [1, 2, 4, 8, 16, 32, 64],
    "precision": ["fp32", "bf16"],
    "checkpointing": ["none", "every_layer"],
    "loss_kernel": ["full", "chunked"],
    "gelu": ["model", "fused"],
}
CHOICES = [dict(zip(SPACE, values, strict=True)) for values in itertools.product(*SPACE.values())]
EXPERIMENTS: list[Any] = [
    SimpleNamespace(micro_batch_size=one["micro_batch_size"], accumulation_steps=BATCH // one["micro_batch_size"])
    for one in CHOICES
]
GIB = 2**30


def made_up(choice: dict[str, Any]) -> Prediction:
    """Return amounts like those of GPT-2: with one sequence the host sets the time, and bf16 launches more."""
    size, half = choice["micro_batch_size"], choice["precision"] == "bf16"
    recomputes, chunks, fuses = (
        choice["checkpointing"] != "none",
        choice["loss_kernel"] == "chunked",
        choice["gelu"] == "fused",
    )
    flops = size * 190e9 * (4 / 3 if recomputes else 1) * (1.1 if chunks else 1)
    peak = 2.0 + size * (0.04 if recomputes else 0.2) * (0.8 if fuses else 1) + size * (0.02 if chunks else 0.15)
    moved = size * 3e9 * (0.7 if half else 1) * (0.8 if fuses else 1)
    return Prediction(
        peak_allocated_bytes=int(peak * GIB),
        peak_reserved_bytes=int(peak * GIB),
        peak_device_bytes=int(peak * GIB),
        smallest_budget_bytes=int(peak * GIB),
        breakdown=None,
        micro_batch_size=size,
        pass_work=Work(
            {"bfloat16" if half else "float32": flops}, moved_bytes=moved, num_kernels=700 * (1.5 if half else 1)
        ),
        update_work=Work({}, moved_bytes=5e9, num_kernels=10),
        num_tokens=BATCH * 256,
    )


def test_nothing_more_is_simulated_where_the_parameters_alone_exceed_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = Breakdown(
        peak_bytes=GIB,
        step=0,
        phase="forward",
        operator="aten.mm",
        module="layer",
        category_bytes={"parameters": GIB},
        module_bytes={"layer": GIB},
        largest=(),
    )
    rounds: list[int] = []

    def predict_each(experiments: Sequence[Any], *_: Any, **__: Any) -> Iterator[tuple[int, Prediction]]:
        rounds.append(len(experiments))
        yield from ((place, replace(made_up(CHOICES[-1]), breakdown=parameters)) for place in range(rounds[-1]))

    monkeypatch.setattr(promising, "predict_each", predict_each)
    found = dict(promising.predict_promising(EXPERIMENTS, CHOICES, RTX4090, GIB - 1, cost_prior(RTX4090)))
    assert rounds == [len(found)] and len(found) < len(CHOICES) / 4


def planned(
    predictions: Sequence[Prediction], budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, float | None]:
    """Return how many configurations are simulated, and by which share the best of them is slower than the fastest."""
    number_of = {id(one): number for number, one in enumerate(EXPERIMENTS)}
    prior = cost_prior(RTX4090)

    def predict_each(experiments: Sequence[Any], *_: Any, **__: Any) -> Iterator[tuple[int, Prediction]]:
        yield from ((place, predictions[number_of[id(one)]]) for place, one in enumerate(experiments))

    def fastest_of(numbers: Iterable[int]) -> float | None:
        fitting = (number for number in numbers if predictions[number].fits(budget_bytes))
        steps = (estimated(predictions[n], EXPERIMENTS[n].accumulation_steps, prior).seconds for n in fitting)
        return min(steps, default=None)

    monkeypatch.setattr(promising, "predict_each", predict_each)
    monkeypatch.setattr(promising, "num_cores", lambda: 2)
    found = dict(promising.predict_promising(EXPERIMENTS, CHOICES, RTX4090, budget_bytes, prior))
    best, fastest = fastest_of(found), fastest_of(range(len(CHOICES)))
    assert fastest is not None
    return len(found), None if best is None else best / fastest - 1


@pytest.mark.parametrize("budget_gib", [3, 6, 12, 40])
def test_the_fastest_that_fits_is_simulated(budget_gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_simulated, lost = planned([made_up(choice) for choice in CHOICES], budget_gib * GIB, monkeypatch)
    assert lost == 0 and num_simulated <= len(CHOICES) / 2


def test_it_is_found_in_most_spaces_whose_values_act_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        planned(_with_interactions(np.random.default_rng(seed)), budget_gib * GIB, monkeypatch)
        for seed, budget_gib in itertools.product(range(10), (3, 6, 12))
    ]
    assert sum(lost == 0 for _, lost in cases) > 0.65 * len(cases)
    assert sum(num_simulated for num_simulated, _ in cases) / len(cases) < len(CHOICES) / 4


def _with_interactions(rng: np.random.Generator) -> list[Prediction]:
    """Return predictions of which each pair of values changes the time and the peak by about 6 %."""
    factors = defaultdict[Any, Vector](lambda: np.exp(rng.normal(0, 0.06, 2)))

    def one(choice: dict[str, Any]) -> Prediction:
        prediction = made_up(choice)
        time, memory = np.prod([factors[pair] for pair in itertools.combinations(choice.items(), 2)], axis=0)
        peak = int(prediction.smallest_budget_bytes * memory)
        return replace(prediction, smallest_budget_bytes=peak, pass_work=prediction.pass_work * float(time))

    return [one(choice) for choice in CHOICES]
