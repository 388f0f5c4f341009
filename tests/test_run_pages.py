"""Pages of runs: their answer, each variant against its baseline, losses to zoom, and a profile to explore."""

# ruff: noqa: F811 - fixtures of test_pages
import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from conftest import tiny
from playwright.sync_api import Page, expect
from test_pages import Shown, needs_browser, search_findings, shown  # noqa: F401
from test_report import GOOD, rows, with_losses

from pipeline.base.by_key import grouped
from pipeline.base.results import Outcome
from pipeline.cli import parse
from pipeline.config.entry_points import FOLDER
from pipeline.config.experiment import make_experiment
from pipeline.config.variants import read_yaml
from pipeline.memory.breakdown import NUM_LARGEST_THEN
from pipeline.report.answers import answer, commands, headlines, short_answer
from pipeline.report.changes import change_text
from pipeline.report.command import command_of
from pipeline.report.comparison import MOST_SHOWN, ComparisonFindings, comparison_report
from pipeline.report.curves import MOST_POINTS
from pipeline.report.findings import Findings, report_of
from pipeline.report.losses import losses_panel
from pipeline.report.other_trainings import other_trainings
from pipeline.report.page import Advice, to_html
from pipeline.report.plot import GREY, Plot, label
from pipeline.report.profile import ProfilingFindings
from pipeline.report.sections import epoch, make_sections
from pipeline.report.tradeoff import LESS, MORE, tradeoff_plots
from pipeline.report.treemap import Rectangle, squarified
from pipeline.training.metrics import Row
from pipeline.training.profiler import MemoryProfile, ProfileMessage, TimeProfile, profile_run
from pipeline.training.time_differences import ERROR, MARGIN, with_times

ONE_INTERVAL = 1.96
"""Standard errors on either side of a time that a 95 % interval has where one variant is compared."""
LONG = "a variant whose name has eighty characters, of which only the last differ: case "


def measured(
    row: Row, mib: float, seconds: float, baseline: Row | None = None, margin_percent: float = 2.0, **changes: Any
) -> Row:
    """Return the row with this peak and time, whose margin is given, and with both against a baseline."""
    metrics = {**row.metrics, "peak_allocated_mib": mib, "seconds_per_step": seconds, "samples_per_second": 1 / seconds}
    metrics |= {MARGIN: margin_percent, ERROR: 100 * math.log1p(margin_percent / 100) / ONE_INTERVAL}
    own = replace(row, metrics=metrics, timings=(), **changes)
    if baseline is None:
        return own
    saving = {"memory_saving_percent": 100 * (1 - mib / baseline.metrics["peak_allocated_mib"])}
    return with_times([baseline, replace(own, metrics={**metrics, **saving})])[1]


def variants() -> list[Row]:
    """Return a baseline, two variants with long names, one that diverged, one out of memory, one that was skipped."""
    first, second, third, diverged, dead, skipped = rows("ok", "ok", "ok", "diverged", "dead", "skipped")
    plain = measured(first, 100, 1.0, name="plain")
    return [
        plain,
        measured(second, 40, 1.3, plain, name=f"{LONG}A"),
        measured(third, 80, 0.8, plain, name=f"{LONG}B"),
        replace(diverged, name="diverges", params=plain.params),
        replace(dead, name="too large", params=plain.params),
        replace(skipped, name="flash", params=plain.params),
    ]


def comparison_findings() -> ComparisonFindings:
    """Return the findings of these variants."""
    return ComparisonFindings(
        entry="combined",
        question="What do they cost?",
        rows=tuple(variants()),
        environment={"torch": "2"},
        sections=("waterfall", "differences"),
    )


@cache
def profiling_findings() -> ProfilingFindings:
    """Return the profile of a tiny model."""
    received: list[ProfileMessage] = []
    experiment = tiny()
    profile_run(experiment, experiment.prepare(), received.append)
    advice = Advice(text="It is large. So it is.", evidence="it: 1 MiB", settings={"loss_kernel": "chunked"})
    return ProfilingFindings(
        entry="profiling",
        question="Where?",
        row=replace(rows("ok")[0], params=experiment.params()),
        memory=next(part for part in reversed(received) if isinstance(part, MemoryProfile)),
        time=next(part for part in received if isinstance(part, TimeProfile)),
        advice=(advice,),
        environment={},
    )


def colours_of(plot: Plot) -> dict[str, set[str]]:
    """Return the colours of the bars of memory and time in a chart of what variants save and cost."""
    lines = [
        line
        for data in json.loads(plot.panels[0].chart.to_json())["layer"]
        for line in data.get("data", {}).get("values", [])
    ]
    found: dict[str, set[str]] = {}
    for line in lines:
        if "measure" in line:
            found.setdefault(line["measure"], set()).add(line["shade"])
    return found


def values_of(findings: ComparisonFindings) -> dict[str, str]:
    """Return the figures of the answer by their titles."""
    return {one.title: one.value for one in comparison_report(findings).headlines}


def test_the_answer_is_a_sentence_figures_and_a_command() -> None:
    shown = variants()
    assert answer(shown) == (
        f"{LONG}A uses the least memory: 60 % less memory and 30 % more time per sample (+26 to +34 %). {LONG}B is the "
        "fastest: 20 % less memory and 20 % less time per sample (-22 to -18 %); 2 of 6 did not complete."
    )
    assert short_answer(shown) == (
        f"{LONG}A saves the most memory: 60 % less memory and 30 % more time per sample (+26 to +34 %); 2 of 6 did not "
        "complete."
    )
    assert values_of(comparison_findings()) == {
        "least memory": "40 MiB",
        "least time per sample": "800 ms",
        "largest loss difference": "0",
        "completed": "3 of 6 runs",
    }
    assert [line for _, line in commands({"it": shown})] == [command_of("main", shown[2].params)]
    in_budget = [replace(row, params={**row.params, "budget": "90MiB"}) for row in shown]
    assert answer(in_budget) == f"3 of 6 trained within the budget of 90MiB. {answer(shown)}"
    assert answer([*in_budget[:5], shown[5]]) == answer(shown), "one of them had no budget"
    [(title, _)] = commands({"it": shown})
    assert title == f"Run again ({LONG}B)"


def test_losses_of_other_models_or_data_are_not_compared() -> None:
    plain, same = (replace(row, metrics={**row.metrics, "eval_loss": 2.0}) for row in rows("ok", "ok"))
    other = replace(same, name="other", params={**same.params, "corpus": "quick_fox"})
    other = replace(other, metrics={"eval_loss": 1.0, "effective_batch_size": 8.0})
    elsewhere = replace(same, params={**same.params, "device": "cuda"})
    for row, is_compared in ((elsewhere, True), (other, False)):
        shown = {one.title for one in headlines({"it": [plain, replace(row, is_baseline=False)]})}
        assert ("lowest held-out loss" in shown or "largest loss difference" in shown) == is_compared
        assert ("the difference from" in losses_panel([plain, row]).title) == is_compared


def test_a_difference_within_noise_is_no_finding() -> None:
    """Not in the answer, its figures, the command, or the colours of bars."""
    plain = measured(rows("ok")[0], 100, 1.0, margin_percent=10, name="plain")
    noisy = [
        measured(row, mib, seconds, plain, margin_percent=10, name=name, is_baseline=False)
        for row, mib, seconds, name in zip(rows("ok", "ok"), (100, 120), (0.9, 0.95), ("A", "B"), strict=True)
    ]
    found = {"it": [plain, *noisy]}
    assert answer(found["it"]) == "None uses less memory than plain. None is faster than plain beyond noise."
    figures = {one.title: (one.value, one.detail) for one in headlines(found)}
    assert figures["least time per sample"] == ("1 s", "plain, the baseline; others: no difference beyond noise")
    assert commands(found) == (("Run again (plain)", command_of("main", plain.params)),)
    [plot] = tradeoff_plots(found)
    assert colours_of(plot) == {"memory": {LESS, MORE}, "time": {GREY}}


def test_a_sentence_about_time_has_its_interval_and_names_whom_noise_hides() -> None:
    plain = measured(rows("ok")[0], 100, 1.0, name="plain")
    sure = [
        measured(row, mib, seconds, plain, name=name, is_baseline=False)
        for row, mib, seconds, name in zip(
            rows("ok", "ok", "ok"), (60, 110, 50), (0.8, 0.81, 18.3), ("A", "B", "slow"), strict=True
        )
    ]
    assert answer([plain, *sure]) == (
        "slow uses the least memory: 50 % less memory and 18.3 times the time per sample (x 17.8 to x 18.8). A is the "
        "fastest (no difference beyond noise to B): 40 % less memory and 20 % less time per sample (-22 to -18 %)."
    )
    assert "e+0" not in to_html(comparison_report(replace(comparison_findings(), rows=(plain, *sure))))
    table = comparison_report(replace(comparison_findings(), rows=(plain, *sure))).tables[0]
    lines = [dict(zip(table.headings, line, strict=True)) for line in table.lines]
    assert [(line["time %"], line["time from to"]) for line in lines[1:]] == [
        ("-20.0", "-22 to -18 %"),
        ("-19.0", "-21 to -17 %"),
        ("x 18.3", "x 17.8 to x 18.8"),
    ]


@pytest.mark.parametrize(
    ("percent", "text"),
    [
        (1730.0, "x 18.3"),
        (1e6, "x 10,001"),
        (199.96, "+200 %"),
        (-1e-9, "+0 %"),
        (12.345, "+12.3 %"),
        (-97.25, "-97.2 %"),
    ],
)
def test_a_change_is_a_percentage_or_a_factor(percent: float, text: str) -> None:
    assert change_text(percent) == text


def test_an_interrupted_job_says_how_far_it_came() -> None:
    for report, progress in (
        (report_of(replace(comparison_findings(), interrupted="3 of 25 variants")), "3 of 25 variants"),
        (report_of(replace(search_findings(), interrupted="3 of at most 16 trials")), "3 of at most 16 trials"),
    ):
        assert report.answer.startswith(f"Interrupted after {progress}. ")
        assert report.lead is None or report.lead.startswith(f"Interrupted after {progress}. ")
        assert (report.headlines[0].title, report.headlines[0].value) == ("interrupted", progress)


def test_a_comparison_of_kinds_has_the_configuration_of_each() -> None:
    plain, other = variants()[:2]
    larger = replace(other, params={**other.params, "micro_batch_size": 2})
    [section] = make_sections(("kinds",), [plain, larger])
    assert "may differ in more than the kind" in section.notes[0]
    assert list(section.tables[0].frame["kind"]) == ["plain", f"{LONG}A"]
    assert section.tables[0].frame["micro_batch_size"][1] == "2"
    assert list(section.tables[0].frame)[1:] == list(read_yaml(FOLDER / "finetune.yaml")["compared"]["space"])


def test_a_name_within_a_sentence_keeps_its_letters() -> None:
    several = [replace(row, comparison=name) for row, name in zip(rows("ok", "ok"), ("LoRA_ranks", "it"), strict=True)]
    report = comparison_report(replace(comparison_findings(), rows=tuple(several)))
    assert report.answer.startswith("LoRA ranks: ") and " It: " in report.answer


def test_an_epoch_counts_the_effective_batch_of_all_processes() -> None:
    [one] = rows("ok")
    metrics = {**one.metrics, "seconds_per_step": 2.0}
    params = {"micro_batch_size": 4, "accumulation_steps": 2, "effective_batch_size": 16, "dataset_size": 160}
    [table] = epoch.section([replace(one, params={**one.params, **params}, metrics=metrics)]).tables
    shown = table.frame.iloc[0]
    assert (shown["effective batch"], shown["updates"], shown["forward passes"]) == (16, 10, 40)
    assert shown["epoch, minutes"] == pytest.approx(20 / 60)


def test_a_baseline_that_none_surpasses_is_the_answer() -> None:
    first, second = rows("ok", "ok")
    plain = measured(first, 100, 1.0, name="plain")
    worse = measured(second, 120, 2.0, plain, name="worse")
    assert answer([plain, worse]) == "None uses less memory than plain. None is faster than plain."
    found = {one.title: one for one in headlines({"it": [plain, worse]})}
    assert (found["least memory"].value, found["least time per sample"].value) == ("100 MiB", "1 s")
    assert found["least time per sample"].detail == "plain, the baseline"


def test_the_figures_of_one_run_are_its_costs() -> None:
    [row] = rows("ok")
    findings = ComparisonFindings(entry="main", question="?", rows=(measured(row, 10, 0.5),), environment={})
    assert list(values_of(findings)) == ["peak memory", "time per optimizer step", "final loss", "held-out loss"]
    assert values_of(findings)["peak memory"] == "10 MiB"
    [(_, line)] = comparison_report(findings).commands
    assert line.startswith("fitproof profiling ")


def test_a_command_makes_the_same_run_again() -> None:
    experiment = tiny(precision="bf16", budget="64MiB", micro_batch_size=2, max_grad_norm="none", num_steps=7)
    words = shlex.split(command_of("main", experiment.params()))
    assert words[:2] == ["fitproof", "main"] and "--learning_rate" not in words
    assert make_experiment(parse("main", words[2:]), "main").params() == experiment.params()
    changed = shlex.split(
        command_of("main", experiment.params(), {"precision": "fp32", "checkpointing": "every_layer"})
    )
    assert "--precision" not in changed or changed[changed.index("--precision") + 1] == "fp32"
    assert changed[changed.index("--checkpointing") + 1] == "every_layer"


def test_each_variant_is_a_pair_of_bars_with_its_interval_or_says_why_not() -> None:
    [plot] = tradeoff_plots({"it": variants()})
    assert plot.title == "against plain (100 MiB, 1 s per sample)"
    spec = plot.panels[0].to_spec()
    axis = spec["layer"][0]["encoding"]["y"]["axis"]
    names = [" ".join(lines) for lines in json.loads(axis["labelExpr"].removesuffix("[datum.value]"))]
    assert names == [row.name for row in variants()[1:]]
    bars, texts = spec["layer"][0]["data"]["values"], spec["layer"][-1]["data"]["values"]
    assert [
        (bar["place"], bar["measure"], *(round(bar[name]) for name in ("low", "percent", "high"))) for bar in bars
    ] == [
        (0, "memory", -60, -60, -60),
        (0, "time", 26, 30, 34),
        (1, "memory", -20, -20, -20),
        (1, "time", -22, -20, -18),
    ]
    assert {text["place"]: text["text"] for text in texts} == {
        2: "diverged",
        3: "out of memory",
        4: "skipped: not here",
    }
    assert tradeoff_plots({"it": rows("dead", "ok")}) == ()


def test_several_comparisons_have_a_figure_for_each_baseline_and_the_first_is_the_answer() -> None:
    plain, small, fast = variants()[:3]
    main = [replace(row, comparison="batch_of_32") for row in (plain, small)]
    found = {"batch_of_32": main, "growing_batch": [plain, fast]}
    assert [plot.name for plot in tradeoff_plots(found)] == ["changes_batch_of_32", "changes_growing_batch"]
    assert [one.value for one in headlines(found)][:2] == ["40 MiB", "1 s"]
    assert [line for _, line in commands(found)] == [command_of("main", small.params)]


def test_a_name_that_is_too_long_keeps_its_end() -> None:
    assert " ".join(label(f"{LONG}A")) == f"{LONG}A"
    assert label(f"{LONG}{LONG}B")[-2:] == ["…", "only the last differ: case B"[-len(label(f"{LONG}{LONG}B")[-1]) :]]


def series_of(spec: dict[str, Any]) -> list[dict[str, list[float | None]]]:
    """Return the values of each run, of the losses and of the differences."""
    return [grouped((point["run"], point["y"]) for point in layer["data"]["values"]) for layer in spec["layer"]]


def test_losses_stand_above_their_differences_from_the_baseline() -> None:
    first, second, third = rows("ok", "ok", "ok")
    compared = [with_losses(first, 5.0, 4.0, 3.5), with_losses(second, 5.0, 4.5), with_losses(third, 5.0, 4.0, 3.0)]
    other_batch = {**third.params, "effective_batch_size": 8}
    upper, lower = series_of(losses_panel([*compared[:2], replace(compared[2], params=other_batch)]).to_spec())
    assert upper == {"ok-0": [5, 4, 3.5], "ok-1": [5, 4.5], "ok-2": [5, 4, 3]}
    assert lower == {"ok-0": [0, 0, 0], "ok-1": [0, 0.5]}


def test_a_resumed_run_is_compared_in_the_steps_that_both_have() -> None:
    first, second = rows("ok", "ok")
    whole, resumed = with_losses(first, 5.0, 4.0, 3.5), with_losses(second, 9.0, 4.5, 4.0, optimizer="sgd")
    assert resumed.result is not None
    resumed = replace(resumed, result=replace(resumed.result, steps=resumed.result.steps[1:]))
    _, lower = series_of(losses_panel([whole, resumed]).to_spec())
    assert lower["ok-1"] == [0.5, 0.5]
    section = other_trainings("kinds", [whole, resumed])
    assert section is not None
    [line] = section.tables[0].frame.to_dict("records")
    assert (line["steps"], line["loss"], line["difference"]) == (2, 4.0, 0.5)


def test_a_run_that_diverged_does_not_hide_the_others() -> None:
    first, second = rows("ok", "ok")
    plain, away = with_losses(first, 5.0, 4.0), with_losses(second, 5.0, 1e9)
    assert away.result is not None
    away = replace(away, result=replace(away.result, outcome=Outcome.DIVERGED))
    upper, lower = series_of(losses_panel([plain, away]).to_spec())
    assert upper["ok-1"] == [5, None] and lower["ok-1"] == [0, None]


def test_rectangles_of_a_treemap_fill_it_by_size() -> None:
    sizes = [6.0, 6, 4, 3, 2, 2, 1]  # the example of Bruls, Huizing and van Wijk
    found = squarified(sizes, Rectangle(0, 0, 6, 4))
    assert [one.width * one.height for one in found] == pytest.approx(sizes)
    assert found[:3] == [Rectangle(0, 0, 3, 2), Rectangle(0, 2, 3, 2), pytest.approx((3, 0, 12 / 7, 7 / 3))]
    for number, one in enumerate(found):
        assert min(one.x, one.y) >= 0 and one.x + one.width <= 6.001 and one.y + one.height <= 4.001
        for other in found[:number]:
            overlap_x = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            overlap_y = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert min(overlap_x, overlap_y) < 1e-9
    assert squarified([], Rectangle(0, 0, 1, 1)) == []


def test_a_page_of_many_long_runs_stays_small() -> None:
    """40 runs of 600 steps with long names."""
    [row] = rows("ok")
    steps = tuple(replace(GOOD.steps[0], step=step, loss=5 + step / 7) for step in range(600))
    many = tuple(
        replace(row, name=f"{LONG}{number}", is_baseline=not number, result=replace(GOOD, steps=steps))
        for number in range(40)
    )
    findings = ComparisonFindings(
        entry="compare", question="?", rows=many, environment={}, sections=("smoothness", "stability", "differences")
    )
    report = comparison_report(findings)
    assert len(to_html(report)) < 2e6
    [losses] = [panel for plot in report.plots for panel in plot.panels if "loss of each" in panel.title]
    upper, _ = series_of(losses.to_spec())
    assert len(upper) == MOST_SHOWN and sum(map(len, upper.values())) <= 2 * MOST_POINTS
    assert any("16 more runs are in the table" in note for section in report.sections for note in section.notes)


@needs_browser
def test_losses_are_highlighted_and_zoomed_by_keyboard(shown: Shown) -> None:
    page = shown(comparison_findings(), 1440, "light")
    chart = page.locator("[data-chart=ladder]", has_text="loss of each optimizer step")
    lines = chart.locator(".mark-line path")
    assert {line.get_attribute("opacity") for line in lines.all()} <= {None, "1"}
    chart.get_by_role("combobox", name="highlighted").select_option("plain")
    expect(lines.nth(1)).to_have_attribute("opacity", "0.1")
    drawn = lines.first.get_attribute("d")
    chart.get_by_role("slider", name="from step").press("ArrowRight")
    expect(lines.first).not_to_have_attribute("d", str(drawn))


@needs_browser
def test_a_moment_of_a_profile_lists_its_largest_tensors(shown: Shown) -> None:
    page = shown(profiling_findings(), 1440, "light")
    assert page.locator(".headlines dd:first-of-type").first.inner_text() == "loss_kernel chunked"
    [command] = page.locator(".suggestions code").all_inner_texts()
    assert command.startswith("fitproof profiling --") and "--loss_kernel chunked" in command
    details = page.locator("output.details")
    at_peak = details.inner_text()
    assert "MiB, loss: " in at_peak and 2 < len(at_peak.splitlines()) <= 1 + NUM_LARGEST_THEN
    page.get_by_role("slider", name="moment").press("Home")
    expect(details).not_to_have_text(at_peak)
    assert "in forward; the largest tensors alive:" in details.inner_text()
    first = details.inner_text()
    moments = page.locator("[data-chart=memory] .moments_marks path")
    moments.nth(moments.count() // 2).hover(force=True)
    expect(details).not_to_have_text(first)
    expect(page.locator("#vg-tooltip-element")).to_contain_text("parameters")
    assert page.locator("[data-chart=modules] .mark-rect path").count() > 5


@needs_browser
def test_a_profile_draws_its_peak_in_the_time_of_the_step_and_names_its_parts(shown: Shown) -> None:
    findings = profiling_findings()
    assert findings.memory is not None and findings.time is not None and findings.memory.course is not None
    page = shown(findings)
    memory = page.locator("[data-chart=memory]")
    tops = [
        box["y"]
        for marks in ("peak_marks path", "mark-symbol.role-mark path")
        for one in memory.locator(f".{marks}").all()
        if (box := one.bounding_box()) is not None
    ]
    assert min(tops[:-1]) - tops[-1] < 20, "the marker stands on the drawn column"
    phases = [phase for phase, _ in findings.memory.course.phases]
    assert set(phases) <= set(memory.locator(".role-legend-label text").all_text_contents())
    data = next(plot for plot in report_of(findings).plots if plot.name == "memory").panels[0].to_spec()
    last = data["data"]["values"][-1]["end"]
    shares = [findings.time.phase_seconds[phase] for phase in set(phases)]
    whole = findings.row.metrics["seconds_per_step"]
    assert last == pytest.approx(1000 * whole * sum(shares) / findings.time.seconds_per_step, rel=0.01)
    boxes = [box for one in page.locator("[data-chart=modules] .mark-rect path").all() if (box := one.bounding_box())]
    texts = [text for text in page.locator("[data-chart=modules] .mark-text text").all_text_contents() if text]
    assert len(texts) >= sum(box["width"] > 100 and box["height"] > 40 for box in boxes) > 3


@pytest.mark.matrix(2)
@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (768, "dark"), (390, "light")])
@pytest.mark.parametrize("findings", [comparison_findings, profiling_findings])
def test_a_page_of_runs_fits_its_screen(
    findings: Callable[[], Findings], width: int, scheme: str, shown: Shown
) -> None:
    page = shown(findings(), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    first = page.locator("[data-chart] svg").first.bounding_box()
    assert first is not None and first["width"] > 0.8 * width
    assert_nothing_is_cut_off(page, width)


@needs_browser
def test_a_label_near_the_end_of_an_axis_is_not_cut_off(shown: Shown) -> None:
    findings = profiling_findings()
    assert findings.memory is not None and findings.memory.course is not None
    course = findings.memory.course
    factor = 0.1053 / course.seconds[-1]  # the last label is 105, that of 105.3 ms would be beyond the chart
    scaled = replace(
        course,
        seconds=tuple(factor * second for second in course.seconds),
        phases=tuple((name, factor * begin) for name, begin in course.phases),
    )
    page = shown(replace(findings, time=None, memory=replace(findings.memory, course=scaled)), 1440, "light")
    assert "105" in page.locator("[data-chart] svg text").all_text_contents()
    assert_nothing_is_cut_off(page, 1440)


def assert_nothing_is_cut_off(page: Page, width: int) -> None:
    """Assert that charts and their texts are inside the page."""
    for chart in page.locator("[data-chart] svg").all():
        box = chart.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width
    texts = page.locator("[data-chart] svg text").evaluate_all(
        "texts => texts.map(text => [text.textContent, text.getBoundingClientRect(), "
        "text.closest('svg').getBoundingClientRect()]).map(([words, own, all]) => "
        "[words, own.left - all.left, all.right - own.right])"
    )
    cut = [(words, left, right) for words, left, right in texts if words and min(left, right) < -1]
    assert not cut
