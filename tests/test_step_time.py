"""The estimated seconds of a step: costs by kind of work, their uncertainty, the rates of cards and of this CPU."""

import csv
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from conftest import CPU, ROOT, tiny
from step_time import ESTIMATES, T4, case_of, errors, estimates, published_cases, table

from pipeline.base.contracts import Hardware
from pipeline.memory.work import Work
from pipeline.planning.rates import RATES, cost_prior, measured_rates, note_on_rates, rate_costs, rates_of
from pipeline.planning.step_time import CALLS, KINDS, CostPrior, amounts, estimated, seconds_by_kind
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.prediction.prediction import Prediction
from pipeline.simulation.cards import CARDS

COSTS = np.array([1e-12, 1e-13, *3 * [1e-14], 2e-12, 2e-13, *3 * [2e-14], 1e-11, 1e-10, 1e-9, 1e-9, 1e-5, 2e-5])


def test_launches_overlap_with_the_work_on_a_gpu_and_add_to_it_on_a_cpu() -> None:
    work = Work({"float32": 1e9, "bfloat16": 1e11}, moved_bytes=1e8, num_kernels=10, host_bytes=1e6)
    assert dict(zip(KINDS, amounts(work), strict=True))["bfloat16"] == 1e11
    launching = Work(num_kernels=1000, num_python_calls=100, moved_bytes=1e8)
    amounts_NK = np.stack([amounts(work), amounts(launching)])
    computed, launched = seconds_by_kind(amounts_NK, COSTS, is_queued=True)
    assert computed.sum() == pytest.approx(1e-3 + 1e-3 + 1e-3 + 1e-4) and computed[-2] == 0
    assert launched.sum() == launched[-2:].sum() == pytest.approx(1e-2 + 2e-3)
    on_cpu = seconds_by_kind(amounts_NK, COSTS, is_queued=False)
    assert on_cpu.sum(axis=1) == pytest.approx([1e-3 + 1e-3 + 1e-3 + 1e-4 + 1e-4, 1e-3 + 1e-2 + 2e-3])


def test_a_step_is_its_passes_and_the_update() -> None:
    works = {"pass_work": Work(moved_bytes=1e9), "last_pass_work": Work(), "update_work": Work(moved_bytes=5e8)}
    prediction = cast(Prediction, SimpleNamespace(**works))
    prior = CostPrior(log_costs_K=np.log(COSTS), deviations_K=np.zeros(len(KINDS)), residual=0.0, is_queued=True)
    assert [estimated(prediction, count, prior).seconds for count in (1, 4)] == pytest.approx([0.015, 0.045])


@pytest.mark.parametrize("is_queued", [False, True])
def test_the_uncertainty_of_each_cost_counts_as_the_time_depends_on_it(is_queued: bool) -> None:
    prediction = predict(tiny(precision="bf16"), find_hardware("h100"))

    def prior(log_costs: np.ndarray, deviations: np.ndarray) -> CostPrior:
        return CostPrior(log_costs_K=log_costs, deviations_K=deviations, residual=0, is_queued=is_queued)

    for change in 1e-6 * np.eye(len(KINDS)):
        more, less = (estimated(prediction, 2, prior(np.log(COSTS) + sign * change, 0 * change)) for sign in (1, -1))
        slope = math.log(more.seconds / less.seconds) / 2e-6
        assert estimated(prediction, 2, prior(np.log(COSTS), 1e6 * change)).deviation == pytest.approx(slope, abs=1e-6)


def test_uncertainty_is_that_of_the_costs_by_their_share() -> None:
    prediction = predict(tiny(precision="bf16"), find_hardware("h100"))
    prior = CostPrior(log_costs_K=np.log(COSTS), deviations_K=np.full(len(KINDS), 0.3), residual=0.1, is_queued=True)
    known = CostPrior(log_costs_K=np.log(COSTS), deviations_K=np.zeros(len(KINDS)), residual=0.1, is_queued=True)
    time = estimated(prediction, 2, prior)
    assert 0.1 < time.deviation <= math.hypot(0.3, 0.1)
    assert estimated(prediction, 2, known).deviation == pytest.approx(0.1)
    assert estimated(prediction, 4, prior).seconds > 1.5 * time.seconds


def test_every_card_has_rates_and_others_are_taken_for_the_closest() -> None:
    assert set(RATES) == set(CARDS)
    for rates in RATES.values():
        assert rates["float32"] <= rates["tf32"] <= rates["float16"]
    h100 = find_hardware("h100")
    half = Hardware(kind="cuda", name="half an H100", memory_bytes=2**36, capability=(9, 0), num_multiprocessors=66)
    assert rates_of(h100) == RATES["h100"]
    assert rates_of(half)["float16"] == RATES["h100"]["float16"] / 2
    assert rates_of(half)["host_bytes"] == RATES["h100"]["host_bytes"]
    assert note_on_rates(h100) is None
    assert "data sheet of NVIDIA H100 80GB HBM3, in proportion to the multiprocessors" in str(note_on_rates(half))
    assert "this machine's CPU" in str(note_on_rates(CPU))
    known = cost_prior(h100)
    assert len(known.log_costs_K) == len(known.deviations_K) == len(KINDS) == len(rate_costs(h100))
    num_calls = len(CALLS)
    assert (np.exp(known.log_costs_K)[:-num_calls] > np.array(rate_costs(h100))[:-num_calls]).all()


def test_a_card_outside_the_table_is_taken_for_one_of_its_series() -> None:
    names = "NVIDIA GeForce RTX 6090", "NVIDIA RTX PRO 9000", "NVIDIA B300"
    capabilities = (12, 1), (12, 1), (10, 3)
    for name, capability, similar in zip(names, capabilities, ("rtx5090", "rtxpro6000", "b200"), strict=True):
        known = find_hardware(similar)
        card = replace(known, name=name, capability=capability)
        assert rates_of(card) == RATES[similar] and known.name in str(note_on_rates(card))
        assert cost_prior(card).deviations_K[0] > cost_prior(known).deviations_K[0]


def test_double_precision_is_not_taken_for_half_and_8_bits_are_twice_as_fast_where_a_card_has_them() -> None:
    assert amounts(Work({"float64": 5.0, "float8_e4m3fn": 3.0}))[:5].tolist() == [5.0, 0, 0, 0, 3.0]
    assert RATES["h100"]["float8"] == 2 * RATES["h100"]["float16"]
    assert RATES["a100"]["float8"] == RATES["a100"]["float16"]


def test_attention_in_one_kernel_counts_apart() -> None:
    work = Work({"bfloat16": 5.0, "bfloat16 attention": 3.0, "float64 attention": 2.0})
    counted = dict(zip(KINDS, amounts(work), strict=True))
    assert {kind: amount for kind, amount in counted.items() if amount} == {
        "bfloat16": 5.0,
        "bfloat16 attention": 3.0,
        "float32 attention": 2.0,
    }


def test_a_cpu_is_measured_once() -> None:
    rates, generator = rates_of(CPU), torch.get_rng_state()
    assert rates is measured_rates()
    measured_rates.__wrapped__()
    assert torch.equal(torch.get_rng_state(), generator)
    assert min(rate for kind, rate in rates.items() if kind not in CALLS) > 1e6
    assert all(0 < 1 / rates[call] < 1 for call in CALLS)


def rows() -> list[dict[str, str]]:
    """Return the committed table."""
    with max((ROOT / "benchmarks").glob("step_time_*.csv")).open() as file:
        return list(csv.DictReader(file))


def test_the_committed_errors_are_those_of_the_committed_work() -> None:
    own = [row for row in rows() if row["subject"] == T4]
    again = list(table([case_of(row) for row in own]))
    for row, other in zip(own, again, strict=True):
        for name in (*ESTIMATES, "measured"):
            assert float(str(other[f"{name}_seconds"])) == pytest.approx(float(row[f"{name}_seconds"]), rel=1e-3)


@pytest.mark.slow
def test_the_times_of_a_group_have_no_part_in_its_own_costs() -> None:
    cases = [case_of(row) for row in rows() if row["subject"] == T4]
    own = [number for number, one in enumerate(cases) if one.group == cases[0].group]
    slower = [replace(one, seconds=9 * one.seconds) if n in own else one for n, one in enumerate(cases)]
    before, after = (estimates(some, find_hardware("t4"))["fitted"] for some in (cases, slower))
    assert before[own] == pytest.approx(after[own])
    assert np.delete(before, own) != pytest.approx(np.delete(after, own), rel=0.1)


@pytest.mark.filterwarnings("ignore")  # of transformers and peft
def test_the_committed_work_is_that_of_the_code() -> None:
    [traced] = published_cases([18])
    [row] = [row for row in rows() if row["name"].startswith("run 18:")]
    committed = case_of(row)
    assert traced.name == committed.name
    assert traced.pass_K == pytest.approx(committed.pass_K) and traced.update_K == pytest.approx(committed.update_K)


def test_published_times_are_within_the_goals() -> None:
    median, _, rank = errors([row for row in rows() if row["subject"] == T4], "fitted")
    assert median <= 20 and rank >= 0.95


def test_times_of_whole_spaces_on_a_cpu_are_in_order() -> None:
    for subject in {row["subject"] for row in rows()} - {T4}:
        assert errors([row for row in rows() if row["subject"] == subject], "fitted")[2] >= 0.95, subject


def test_the_documents_have_the_committed_numbers() -> None:
    page = max((ROOT / "benchmarks").glob("step_time_*.md")).read_text()
    documented = (ROOT / "docs" / "prediction.md").read_text()
    summary = [line for line in page.splitlines() if any(f"| {words} |" in line for words in ESTIMATES.values())]
    assert len(summary) == 6 * len(ESTIMATES)
    assert [line for line in summary if line not in documented] == []
    found = {
        subject: errors([row for row in rows() if row["subject"] == subject], "fitted")
        for subject in dict.fromkeys(row["subject"] for row in rows())
    }
    on_t4 = found.pop(T4)
    whole = [errors_of for subject, errors_of in found.items() if subject.endswith("default space")]
    small = [errors_of for subject, errors_of in found.items() if not subject.endswith("default space")]
    evidence = (ROOT / "docs" / "evidence.md").read_text()
    assert f"median error {on_t4[0]:.1f} %, rank correlation {on_t4[2]:.3f}; " in evidence
    for spaces, words in ((small, "three small spaces"), (whole, "two default spaces")):
        medians, ranks = ([one[number] for one in spaces] for number in (0, 2))
        ranges = f"{min(medians):.1f} to {max(medians):.1f} %, {min(ranks):.3f} to {max(ranks):.3f}"
        assert f"{words} {ranges}" in evidence
