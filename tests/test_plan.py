"""Plans: which configurations fit which card, before anything runs, and invalid input."""

import json
import re
from dataclasses import replace
from typing import Any

import mlflow
import pandas as pd
import pytest
from conftest import THREE_LEVERS, TINY, own_cache, tiny
from finished import Done
from processes import interrupted, started, wait_for
from project import SMALL, Project

from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB
from pipeline.jobs import plan as plan_job
from pipeline.memory.breakdown import Breakdown
from pipeline.planning.plan import CardPlan, PlanFindings, PlannedRow, expected_order
from pipeline.planning.reasons import reasons_for
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.report.findings import read_findings, report_of
from pipeline.report.heat_map import _shown, fit_plot
from pipeline.report.page import to_html

CARDS = {**SMALL, "gpu": "rtx4090,t4", "effective_batch_size": "4", "model": "gpt2-nano"}


def table(project: Project, name: str) -> pd.DataFrame:
    run_id = project.parent_of("plan").info.run_id
    return pd.read_csv(mlflow.MlflowClient(project.store).download_artifacts(run_id, f"{name}.csv"))


def test_its_prediction_for_a_cpu_is_what_a_run_then_measures(finished: tuple[Project, Done]) -> None:
    project, done = finished
    assert "are predicted to fit" in " ".join(done["plan"].stdout.split())
    [folder] = project.folder.glob("runs/*-plan-*")
    findings = read_findings(folder)
    assert isinstance(findings, PlanFindings)
    [card] = findings.cards
    predicted = {tuple(row.choice.values()): row for row in card.rows}
    measured = pd.read_csv(next(project.folder.glob("runs/*-search-*/trials.csv")))
    compared = 0
    for line in measured.to_dict("records"):
        row = predicted[line["micro_batch_size"], line["checkpointing"], line["precision"]]
        assert row.peak_allocated_bytes / 2**20 == pytest.approx(line["peak_allocated_mib"], rel=0.015)
        compared += 1
    assert compared == len(measured) >= 4


@pytest.mark.slow
def test_several_cards_give_a_line_each(project: Project) -> None:
    done = project.mlflow_run_here("plan", {**CARDS, "space": json.dumps({**THREE_LEVERS, "precision": "auto"})})
    assert done.returncode == 0, done.stderr
    cards = table(project, "cards").set_index("card")
    assert list(cards.index) == [find_hardware(name).name for name in ("rtx4090", "t4")]
    assert (cards["tokens/s"] * cards["seconds per step"]).tolist() == pytest.approx([4 * 32] * 2)
    assert set(table(project, "plan_tesla_t4")["precision"]) == {"fp32", "fp16"}  # bf16 needs Ampere
    rows = table(project, "plan_nvidia_geforce_rtx_4090")
    assert len(rows) == 3 * 3 * 2 and set(rows["fits"]) == {"yes"}
    assert (rows["reserved MiB"] >= rows["allocated MiB"]).all()
    assert rows["seconds per step"].is_monotonic_increasing
    said = " ".join(done.stdout.split())
    assert re.search(r"estimated [\d.]+ s a step, [\d,]+ tokens a second \(± \d+ %\)", said)
    assert "On NVIDIA GeForce RTX 4090 18 of 18 configurations are predicted to fit" in said
    assert len(done.stdout.splitlines()) <= 30, done.stdout
    assert re.search(
        r"run it on NVIDIA GeForce RTX 4090:\n  fitproof main --model gpt2-nano .*--micro_batch_size", done.stdout
    )
    [folder] = project.folder.glob("runs/*-plan-*")
    page = to_html(report_of(read_findings(folder)))
    assert "<h2>where to start on each card</h2>" in page and page.count("<td>every_layer</td>") > 8
    assert (
        project.parent_of("plan").data.tags["answer"].startswith("On NVIDIA GeForce RTX 4090 18 of 18 configurations")
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu": "h900"}, "no card is called 'h900'; the closest are h200"),
        ({"model": "gpt3"}, "no model is called 'gpt3'"),
        ({"sequence_length": "9999"}, "sequence_length must fit the model's positions"),
        ({"budget": "0.02MB"}, "the parameters must fit the budget: those of gpt2-nano alone take"),
        ({"budget": "99TiB"}, "a budget cannot be more than the device's memory"),
        ({"effective_batch_size": "none"}, "a plan needs effective_batch_size"),
        ({"space": '{"model": ["gpt2"]}'}, "share model, so it cannot be a dimension"),
    ],
)
def test_what_cannot_be_planned_is_refused(settings: dict[str, str], words: str, project: Project) -> None:
    before = len(project.runs())
    done = project.here("plan", {**CARDS, "gpu": "t4", **settings})
    assert done.returncode == 2, done.stdout
    assert words in done.stderr and len(done.stderr.strip().splitlines()) <= 2
    assert len(project.runs()) == before


def test_mlflow_run_passes_on_what_the_user_gave_and_nothing_else(project: Project) -> None:
    """Also where the value is the default: it pins its dimension."""
    given = {**CARDS, "gpu": "rtx4090", "effective_batch_size": "8", "precision": "fp32", "micro_batch_size": "8"}
    done = project.mlflow_run_here("plan", given)
    assert done.returncode == 0, done.stderr
    rows = table(project, "plan_nvidia_geforce_rtx_4090")
    assert set(rows["precision"]) == {"fp32"} and set(rows["micro-batch"]) == {8} and len(rows) == 3
    params = project.parent_of("plan").data.params
    answer = {name: value for name, value in params.items() if name.startswith("answer/")}
    assert {name: value for name, value in params.items() if name not in answer} == {**given, "model": "gpt2-nano"}
    assert {"answer/precision": "fp32", "answer/micro_batch_size": "8"}.items() <= answer.items()


@pytest.mark.quick
def test_nothing_fits_is_an_answer(project: Project) -> None:
    done = project.here("plan", {**CARDS, "gpu": "cpu", "budget": "0.3MiB"})
    assert done.returncode == 1, done.stderr
    assert "Nothing is predicted to fit 0 MiB" in " ".join(done.stdout.split())


def test_a_card_that_can_run_nothing_says_why(project: Project) -> None:
    done = project.here("plan", {**CARDS, "gpu": "t4", "precision": "bf16"})
    assert done.returncode == 2, done.stdout
    words = " ".join(done.stderr.split())
    assert "Tesla T4: bf16 needs" in words and "left out" not in words and "no configuration is" in words


def test_a_device_on_which_nothing_is_predicted_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, is_first = plan_job._outcomes, iter([True, False])

    def of_one(experiments: Any, *others: Any) -> Any:
        if not next(is_first):
            return outcomes(experiments, *others)
        return ((number, InvalidInputError("it reads a value")) for number, _ in enumerate(experiments))

    monkeypatch.setattr(plan_job, "_outcomes", of_one)
    settings = {**TINY, "effective_batch_size": 2, "gpu": "cpu,cpu", "space": {"micro_batch_size": [2]}}
    without, card = plan_job.make_plan(settings).cards
    assert without.rows == () and without.skipped == ("no configuration is predicted: it reads a value",)
    assert len(card.rows) == 1


def test_a_device_is_one_of_this_machine() -> None:
    settings = {**TINY, "effective_batch_size": 2, "device": "cuda:7", "space": {"micro_batch_size": [2]}}
    with pytest.raises(InvalidInputError, match="cuda:7"):
        plan_job.make_plan(settings)


def test_operations_are_counted() -> None:
    """6 x parameters x tokens (Kaplan et al. 2020), and the blocks' forward pass again where they are recomputed.

    Their last product (4 of 12 squares of the width) is not recomputed: nothing needs its result.
    """
    sizes: dict[str, Any] = {"micro_batch_size": 1, "causal_lm__width": 128, "causal_lm__num_heads": 4}
    plain = predict(tiny(**sizes), find_hardware("h100")).pass_work.flops
    again = predict(tiny(**sizes, checkpointing="every_layer"), find_hardware("h100")).pass_work.flops
    layers, width, tokens, vocabulary = TINY["causal_lm"]["num_layers"], 128, 32, 512
    products = layers * 12 * width**2 + vocabulary * width
    assert plain == pytest.approx(6 * products * tokens, rel=0.1)
    assert again - plain == pytest.approx(2 * layers * 8 * width**2 * tokens, rel=0.1)


def row(mib: int, seconds: float, fits: bool = True, **choice: Any) -> PlannedRow:
    """Return a planned configuration of 64 tokens with this peak and time."""
    return PlannedRow(
        choice=choice,
        micro_batch_size=choice.get("micro_batch_size", 1),
        accumulation_steps=1,
        peak_allocated_bytes=mib * MIB,
        peak_reserved_bytes=None,
        peak_device_bytes=None,
        fits=fits,
        seconds=seconds,
        deviation=0.2,
        tokens=64,
    )


def test_the_expected_order_is_by_seconds_and_then_by_memory() -> None:
    expected = [row(30, 1.0), row(10, 2.0), row(20, 2.0)]
    assert sorted([*expected[1:], expected[0]], key=expected_order) == expected
    rows = (row(30, 1.0, fits=False), *expected[1:])
    card = CardPlan(card="a card", budget_bytes=20 * MIB, rows=rows, skipped=(), breakdown=None)
    assert card.recommended == expected[1]
    assert expected[1].tokens_per_second == 32
    longer = replace(row(10, 3.0), tokens=256)  # more seconds a step, fewer per token
    assert min(expected[0], longer, key=expected_order) == longer


def breakdown(module_mib: dict[str, int]) -> Breakdown:
    """Return the breakdown of a peak that has so many MiB in each module."""
    return Breakdown(
        peak_bytes=sum(module_mib.values()) * MIB,
        step=1,
        phase="backward",
        operator="mm",
        module="",
        category_bytes={},
        module_bytes={name: mib * MIB for name, mib in module_mib.items()},
        largest=(),
    )


def test_each_value_is_recommended_for_what_its_default_would_need() -> None:
    best = {"micro_batch_size": 4, "checkpointing": "every_layer", "precision": "bf16", "loss": "chunked"}
    planned: list[tuple[PlannedRow, dict[str, int]]] = [
        (row(100, 2.0, **best), {"h.0.mlp": 40, "lm_head": 20, "wte": 40}),
        (
            row(400, 2.0, fits=False, **{**best, "loss": "full"}),
            {"h.0.mlp": 40, "lm_head": 150, "loss": 170, "wte": 40},
        ),
        (row(220, 1.9, fits=False, **{**best, "checkpointing": "none"}), {"h.0.mlp": 100, "h.1.mlp": 60, "wte": 60}),
        (row(90, 2.5, **{**best, "precision": "fp32"}), {"wte": 90}),
        (row(180, 2.0, fits=False, **{**best, "micro_batch_size": 8}), {"wte": 180}),
        (row(300, 2.0, fits=False, **{**best, "micro_batch_size": 16}), {"wte": 300}),
    ]
    rows, breakdowns = [one for one, _ in planned], [breakdown(parts) for _, parts in planned]
    defaults = {"checkpointing": "none", "precision": "fp32", "loss": "full", "micro_batch_size": 1}
    assert reasons_for(rows[0], rows, breakdowns, defaults) == (
        "micro_batch_size=8 would peak at 180 MiB, which does not fit.",
        "checkpointing=none would peak at 220 MiB (73 % of it for the layers), which does not fit.",
        "precision=fp32 would take 25 % longer.",
        "loss=full would peak at 400 MiB (80 % of it for the logits), which does not fit.",
    )
    assert reasons_for(rows[0], rows[:1], breakdowns[:1], defaults) == ()
    unknown = [replace(one, module_bytes={}) for one in breakdowns]
    assert "220 MiB, which" in reasons_for(rows[0], rows, unknown, defaults)[1]


def test_a_heat_map_has_a_control_for_each_dimension_beside_its_axes_and_the_budget() -> None:
    plain = {"micro_batch_size": 1, "checkpointing": "none"}
    rows = tuple(row(size, 1.0, **plain, precision=name) for size, name in ((10, "fp32"), (8, "bf16")))
    card = CardPlan(card="T4", budget_bytes=9 * MIB, rows=rows, skipped=(), breakdown=None)
    plot = fit_plot("fit", card, 100)
    panel, _ = plot.panels
    assert (plot.title, plot.given) == ("what fits T4", "precision bf16")
    budget, marked, precision = panel.to_spec()["params"]
    assert marked["value"] == [1] and "nothing" not in str(panel.what_if)
    assert (budget["value"], precision["value"], precision["bind"]["options"]) == (9, "bf16", ["fp32", "bf16"])
    alone, _ = fit_plot("fit", replace(card, rows=tuple(row(8, 1.0, **plain) for _ in range(2))), 100).panels
    assert [one["name"] for one in alone.to_spec()["params"]] == ["budget", "marked"]


def test_a_heat_map_of_a_part_of_a_space_has_the_axes_that_show_the_most() -> None:
    start = {"micro_batch_size": 8, "checkpointing": "none", "precision": "bf16", "loss_kernel": "full"}
    others = [{"loss_kernel": "chunked"}, {"loss_kernel": "chunked", "checkpointing": "every_layer"}]
    far = {"micro_batch_size": 4, "precision": "fp32", "loss_kernel": "chunked"}
    rows = tuple(row(8, 1.0 + number, **{**start, **other}) for number, other in enumerate([{}, *others, far]))
    card = CardPlan(card="T4", budget_bytes=9 * MIB, rows=rows, skipped=(), breakdown=None)
    plot = fit_plot("fit", card, 100)
    assert "by loss_kernel and checkpointing: " in plot.panels[0].title
    assert plot.given == "micro-batch 8, precision bf16"


def test_a_heat_map_shows_the_fastest_combinations_of_a_large_plan() -> None:
    rows = tuple(
        row(8, seconds, micro_batch_size=size, checkpointing="none", precision=name)
        for seconds, name in ((2.0, "fp32"), (1.0, "bf16"), (3.0, "fp16"))
        for size in (1, 2)
    )
    assert [one.choice["precision"] for one in _shown(rows, 5)] == ["fp32", "fp32", "bf16", "bf16"]
    lean = row(4, 9.0, micro_batch_size=1, checkpointing="none", precision="fp16")
    assert [one.choice["precision"] for one in _shown((*rows, lean), 5)] == ["bf16", "bf16", "fp16", "fp16", "fp16"]


def test_findings_are_plain_json(finished: tuple[Project, Done]) -> None:
    [folder] = finished[0].folder.glob("runs/*-plan-*")
    assert json.loads((folder / "findings.json").read_text())["kind"] == "PlanFindings"


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(project: Project) -> None:
    cache = own_cache(project.folder / "cache")
    project.environment["FITPROOF_CACHE"] = str(cache)
    before = len(project.runs())
    words = ["python", "-m", "fitproof", "plan", "--gpu", "t4", "--model", "gpt2-medium"]
    with started(project, *words) as process:
        wait_for(lambda: any(cache.glob("prediction-*")), "the first prediction")
        err = interrupted(process)
    assert process.returncode == 130, err
    assert "interrupted: the predictions so far are kept" in err
    assert len(project.runs()) == before
