"""A search predicts what it proposes: of a large space a part, with the same answer as where all is predicted."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline.config.space import Choice
from pipeline.memory.work import Work
from pipeline.searching.acquisition import Rules
from pipeline.searching.candidates import Candidate, known_peaks
from pipeline.searching.measurements import Measurements
from pipeline.searching.sampler import PredictiveSampler, expectation_of, with_expectations

MIB = 2**20
SPACE: dict[str, Sequence[Any]] = {
    "micro_batch_size": (1, 2, 4, 8, 16, 32),
    "precision": ("fp32", "bf16"),
    "checkpointing": ("none", "every_layer"),
    "loss_kernel": ("full", "chunked"),
    "gelu": ("model", "fused"),
}


def candidate_of(choice: Choice) -> Candidate:
    """Return a made-up configuration whose levers do not simply add up: bf16 halves what checkpointing leaves."""
    size, half = int(choice["micro_batch_size"]), choice["precision"] == "bf16"  # type: ignore[arg-type]
    recomputes, chunks = choice["checkpointing"] != "none", choice["loss_kernel"] == "chunked"
    activations = size * (3 if recomputes else 12) * (0.5 if half else 1) * (0.9 if choice["gelu"] == "fused" else 1)
    peak_bytes = int((40 + activations + size * (1 if chunks else 8)) * MIB)
    flops = size * 1e9 * (4 / 3 if recomputes else 1) * (1.1 if chunks else 1)
    return Candidate(
        choice=choice,
        micro_batch_size=size,
        num_passes=32 // size,
        num_tokens=32 * 128,
        pass_work=Work({"bfloat16" if half else "float32": flops}, moved_bytes=size * 1e7, num_kernels=300),
        update_work=Work({}, moved_bytes=1e7, num_kernels=10),
        predicted_bytes=peak_bytes,
    )


CANDIDATES = [candidate_of(dict(zip(SPACE, values, strict=True))) for values in itertools.product(*SPACE.values())]


def log_seconds(one: Candidate) -> float:
    """Return the logarithm of the seconds per token that are measured."""
    works = [one.pass_work] * one.num_passes + [one.update_work]
    costs = {"float32": 2e-12, "bfloat16": 5e-13}
    seconds = sum(
        sum(costs[kind] * flops for kind, flops in work.matrix_flops.items())
        + 1e-10 * work.moved_bytes
        + 5e-6 * work.num_kernels
        for work in works
    )
    return math.log(seconds / one.num_tokens)


def unpredicted() -> list[Candidate]:
    """Return the candidates before their predictions."""
    return [replace(one, predicted_bytes=None, is_expected=True, is_work_known=False) for one in CANDIDATES]


@pytest.mark.parametrize("budget_mib", [90, 160, 400])
def test_a_part_is_predicted_and_the_fastest_is_found(budget_mib: int) -> None:
    number_of = {tuple(one.choice.items()): number for number, one in enumerate(CANDIDATES)}
    predicted = list[int]()

    def predict(candidates: Sequence[Candidate]) -> list[Candidate]:
        numbers = [number_of[tuple(one.choice.items())] for one in candidates]
        predicted.extend(numbers)
        return [CANDIDATES[number] for number in numbers]

    sampler = PredictiveSampler(unpredicted(), Rules(budget_bytes=budget_mib * MIB), predict, 4)
    sampler.predict(expectation_of(CANDIDATES).first())
    assert len(predicted) <= 12
    runs: dict[int, list[float]] = {}
    while True:
        peaks = {number: float(CANDIDATES[number].predicted_bytes or 0) for number in runs}
        over = frozenset(number for number in runs if not CANDIDATES[number].fits(budget_mib * MIB))
        measured = Measurements(runs=runs, peak_bytes=peaks, over_budget=over, failed=frozenset(), running=frozenset())
        number = sampler.evaluate_measured(measured).next
        if number is None:
            break
        assert number in predicted and number not in runs
        runs[number] = [log_seconds(CANDIDATES[number])]
    fitting = [one for one in CANDIDATES if one.fits(budget_mib * MIB)]
    fastest = min(map(log_seconds, fitting))
    assert min(one for [one] in runs.values()) <= fastest + 0.01
    assert len(set(predicted)) == len(predicted) < len(CANDIDATES)


def test_what_is_expected_is_no_prediction() -> None:
    known = {number: CANDIDATES[number] for number in expectation_of(CANDIDATES).first()}
    mixed = [known.get(number, one) for number, one in enumerate(unpredicted())]
    expected = with_expectations(mixed, 200 * MIB, "cpu")
    assert {number for _, number in known_peaks(expected)} == set(known)
    assert all(one.predicted_bytes is not None for one in expected)
    base = {**CANDIDATES[min(known)].choice, "micro_batch_size": 0}
    for one, true in zip(expected, CANDIDATES, strict=True):
        if {**one.choice, "micro_batch_size": 0} == base:  # of which three sizes are known
            assert one.predicted_bytes == pytest.approx(true.predicted_bytes, rel=0.02)
            assert one.is_expected is (one not in known.values())


def test_one_that_is_lean_without_accumulation_is_found_where_all_others_are_too_large() -> None:
    """Gradients that wait for the next micro-batch take more than the activations of all sequences at once."""
    gradients = 120 * MIB

    def with_gradients(one: Candidate) -> Candidate:
        peak_bytes = (one.predicted_bytes or 0) + gradients * (one.num_passes > 1)
        return replace(one, predicted_bytes=peak_bytes)

    known = {tuple(one.choice.items()): with_gradients(one) for one in CANDIDATES}
    fitting = {choice for choice, one in known.items() if one.fits(120 * MIB)}
    assert len(fitting) == 2 and all(dict(choice)["micro_batch_size"] == 32 for choice in fitting)

    def predict(candidates: Sequence[Candidate]) -> list[Candidate]:
        return [known[tuple(one.choice.items())] for one in candidates]

    sampler = PredictiveSampler(unpredicted(), Rules(budget_bytes=120 * MIB), predict, 4)
    sampler.predict(expectation_of(CANDIDATES).first())
    while sampler.first is None:
        assert sampler.predict_leanest()
    assert tuple(sampler.candidates[sampler.first].choice.items()) in fitting
    assert sum(one.is_expected for one in sampler.candidates) > len(CANDIDATES) / 3
