"""Pages in a real browser: charts, the answer at another budget, cards as buttons, filters, light and dark, print."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CHROMIUM
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Browser, Page, expect
from test_search import made_up

from pipeline.base.units import MIB
from pipeline.planning.plan import CardPlan, PlanFindings, PlannedRow
from pipeline.report.answer_plots import contributions_plot
from pipeline.report.configurations import MEASURED, PREDICTED, REFUSED, configurations_of
from pipeline.report.findings import Findings, report_of
from pipeline.report.page import Source, sentence, to_html
from pipeline.report.plot import mib_text
from pipeline.searching.certificate import FAILING, NOT_TRIED, UNFIT, Certificate, Unmeasured
from pipeline.searching.results import SearchFindings, Verification
from pipeline.searching.trials import Trial, label

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
BUDGET = 100 * MIB
TOKENS = 1000
"""Tokens of an optimizer step."""
CHOICES = [
    {"micro_batch_size": micro, "checkpointing": checkpointing, "precision": precision}
    for micro in (1, 2, 4, 8, 16)
    for checkpointing in ("none", "every_layer")
    for precision in ("fp32", "bf16")
]
BASELINE, BEST = CHOICES[8], CHOICES[13]
LONG = "a name of eighty characters, which no page may cut off nor let scroll its screen"
Shown = Callable[..., Page]


def trial(number: int, choice: dict[str, object]) -> Trial:
    """Return a trial of the made-up machine."""
    peak, speed = made_up(choice)
    metrics = {"tokens_per_second": speed, "seconds_per_step": TOKENS / speed, "peak_allocated_mib": peak / MIB}
    outcome = "ok" if peak <= BUDGET else "over_budget"
    return Trial(
        number=number,
        choice=choice,
        outcome=outcome,
        fits=peak <= BUDGET,
        metrics=metrics,
    )


def search_findings() -> SearchFindings:
    """Return a search that measured the baseline, one over the budget and the best, and predicted the rest."""
    rows = tuple(trial(number, choice) for number, choice in enumerate((BASELINE, CHOICES[16], BEST)))
    others = [choice for choice in CHOICES if choice not in [row.choice for row in rows]]
    unmeasured = tuple(
        Unmeasured(
            choice=choice,
            predicted_peak_bytes=made_up(choice)[0],
            predicted_seconds_per_step=TOKENS / made_up(choice)[1],
            reason=NOT_TRIED if made_up(choice)[0] <= BUDGET else UNFIT,
            predicted_deviation=0.1,
            probability_of_fit=0.97 if made_up(choice)[0] <= BUDGET else 0.0,
            probability_of_improvement=0.25 if choice["micro_batch_size"] == 8 else 0.0,
        )
        for choice in others
    )
    certificate = Certificate(
        gap=0.01,
        bound=0.02,
        remaining_improvement=0.02,
        confidence=0.95,
        residual_rms=0.01,
        is_adequate=True,
        num_configurations=len(CHOICES),
        num_measured=3,
        unmeasured=unmeasured,
        seconds_measured=3,
        seconds_of_brute_force=20,
    )
    verification = Verification(
        answer=rows[2],
        plain=rows[0],
        num_steps=8,
        max_loss_difference=0.001,
        tolerance=0.01,
        seconds_measured=1,
        runs=tuple(replace(row, number=0, source=role) for role, row in (("answer", rows[2]), ("plain", rows[0]))),
    )
    return SearchFindings(
        model="gpt2-nano",
        effective_batch_size=16,
        budget_bytes=BUDGET,
        num_configurations=len(CHOICES),
        baselines=(BASELINE,),
        shows_front=False,
        rows=rows,
        certificate=certificate,
        verification=verification,
        settings={"model": "gpt2-nano", "sequence_length": 1024},
        environment={"torch": "2"},
        seconds={"predicting": 2.0, "trials": 3.0, "verification": 1.0, "overhead": 0.5},
    )


def test_an_answer_says_what_failed_and_what_its_memory_is_of() -> None:
    found = search_findings()
    assert found.certificate is not None
    crashed = replace(found.rows[1], outcome="crashed", detail="Traceback\nValueError: no bf16 here.", fits=False)
    cause = f"precision={crashed.choice['precision']}"
    failing = [replace(one, reason=FAILING, cause=cause) for one in found.certificate.unmeasured[:5]]
    certificate = replace(found.certificate, num_failed=1, unmeasured=tuple(failing))
    rows = (found.rows[0], crashed, found.rows[2])
    of_card: dict[str, Any] = {"given": {"gpu": "t4"}}
    of_card |= {"settings": {**found.settings, "gpu": "Tesla T4"}, "environment": {"device_name": "AMD EPYC"}}
    answer = report_of(replace(found, rows=rows, certificate=certificate, **of_card)).answer
    assert "(2 of " in answer and f"2 measured, 1 failed, 5 with a value that fails ({cause})" in answer
    assert f"{cause} failed on this machine with ValueError: no bf16 here: whether" in answer
    assert "Memory is that of a simulated Tesla T4, times are of AMD EPYC." in answer
    assert "simulated" not in report_of(found).answer and "failed" not in report_of(found).answer


def plan_findings() -> PlanFindings:
    """Return a plan of the made-up machine for three cards, one with a long name."""

    def card(name: str, budget_mib: int) -> CardPlan:
        rows = tuple(
            PlannedRow(
                choice=choice,
                micro_batch_size=int(str(choice["micro_batch_size"])),
                accumulation_steps=16 // int(str(choice["micro_batch_size"])),
                peak_allocated_bytes=made_up(choice)[0],
                peak_reserved_bytes=None,
                peak_device_bytes=None,
                fits=made_up(choice)[0] <= budget_mib * MIB,
                seconds=TOKENS / made_up(choice)[1],
                deviation=0.2,
                tokens=TOKENS,
                category_bytes={"parameters": 5 * MIB, "activations": made_up(choice)[0] - 5 * MIB},
            )
            for choice in CHOICES
        )
        return CardPlan(card=name, budget_bytes=budget_mib * MIB, rows=rows, skipped=(), breakdown=None)

    return PlanFindings(
        entry="plan",
        model="gpt2-nano",
        effective_batch_size=16,
        dataset_size=64,
        cards=(card("Card A", 100), card(LONG, 60), card("Card C", 20)),
        settings={},
        environment={},
    )


@pytest.fixture
def shown(browser: Browser, tmp_path: Path) -> Iterator[Shown]:
    """Open the page of findings at a width in a scheme, without a network; it must not fail."""
    failures: list[str] = []

    def open_page(findings: Findings, width: int = 1440, scheme: str = "light", source: Source | None = None) -> Page:
        file = tmp_path / "report.html"
        file.write_text(to_html(report_of(findings), source=source))
        assert file.stat().st_size < 2e6
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)  # type: ignore[arg-type]
        page = context.new_page()
        page.on("requestfailed", lambda request: failures.append(request.url))
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda said: failures.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(f"file://{file}")
        page.locator("html[data-drawn]").wait_for(state="attached", timeout=60_000)
        return page

    yield open_page
    assert not failures


def move(page: Page, budget: float) -> str:
    """Move the budget and return the answer that is shown then."""
    before = page.locator("output").inner_text()
    slider = page.get_by_role("slider")
    slider.evaluate("(slider, to) => { slider.value = to; slider.dispatchEvent(new Event('input')); }", budget)
    expect(page.locator("output")).not_to_have_text(before)
    return spaced(page.locator("output").inner_text())


def spaced(text: str) -> str:
    """Return a text of a page, where a number and its unit are on one line, with usual spaces."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


def rings(page: Page) -> int:
    """Return the number of configurations with a ring."""
    return page.locator("[data-chart=memory_against_throughput] .rings_marks path").count()


def test_configurations_are_measured_predicted_or_refused() -> None:
    found = configurations_of(search_findings())
    assert len(found) == len(CHOICES)
    for one in found:
        peak, speed = made_up(one.choice)
        assert (one.mib, one.speed) == (pytest.approx(peak / MIB), pytest.approx(speed))
        is_measured = one.choice in (BASELINE, CHOICES[16], BEST)
        assert one.kind == (MEASURED if is_measured else PREDICTED if peak <= BUDGET else REFUSED)


def test_contributions_lead_from_the_baseline_to_the_answer_through_known_configurations() -> None:
    findings = search_findings()
    [plot] = contributions_plot(findings, configurations_of(findings))
    spec = plot.panels[0].to_spec()
    names = json.loads(spec["layer"][0]["encoding"]["y"]["axis"]["labelExpr"].removesuffix("[datum.value]"))
    labels = [" ".join(lines) for lines in names]
    assert labels == ["baseline", "+ precision bf16", "+ micro-batch 8", "the answer"]
    sizes = [line["value"] for line in spec["data"]["values"]]
    on_the_way = {**BASELINE, "precision": "bf16"}
    assert sizes == [pytest.approx(made_up(choice)[0] / MIB) for choice in (BASELINE, on_the_way, BEST, BEST)]


@pytest.mark.parametrize("findings", [search_findings, plan_findings])
def test_charts_follow_the_schema_of_vega_lite(findings: Callable[[], Findings]) -> None:
    for plot in report_of(findings()).plots:
        for panel in plot.panels:
            panel.chart.to_dict(validate=True)


@needs_browser
def test_a_search_answers_for_another_budget(shown: Shown) -> None:
    page = shown(search_findings(), 1440, "light")
    assert page.locator(".headlines dd:first-of-type").all_inner_texts() == [
        "micro-batch 8, checkpointing none, precision bf16",
        "2.00\N{NO-BREAK SPACE}x baseline",
        "96.8\N{NO-BREAK SPACE}MiB",
        "at most 2\N{NO-BREAK SPACE}% slower",
        "yes",
    ]
    own = spaced(page.locator("output").inner_text())
    assert own.startswith("At 100.0 MiB: measured, micro-batch 8, checkpointing none, precision bf16: 96.8 MiB")
    assert rings(page) == 1
    less = move(page, 50)
    assert less.startswith("At 50 MiB: nothing that was measured fits. Predicted to fit, not measured: micro-batch")
    assert rings(page) == 1
    more = move(page, 180)
    assert "measured, micro-batch 8" in more
    assert "Predicted to be faster, not measured: micro-batch 16, checkpointing none, precision bf16" in more
    assert rings(page) == 2
    points = page.locator("[data-chart=memory_against_throughput] .mark-symbol.role-mark path")
    everything = points.count()
    page.get_by_role("combobox", name="show").select_option(MEASURED)
    expect(points).to_have_count(3 + rings(page))
    page.get_by_role("combobox", name="show").select_option("all")
    expect(points).to_have_count(everything)
    page.get_by_role("slider").press("ArrowLeft")
    expect(page.locator("output")).not_to_have_text(more)


@needs_browser
def test_a_pointer_on_a_point_is_told_everything_of_it(shown: Shown) -> None:
    page = shown(search_findings(), 1440, "light")
    page.locator("[data-chart=memory_against_throughput] .measured_marks path").last.hover(force=True)
    tip = page.locator("#vg-tooltip-element")
    expect(tip).to_be_visible()
    told = ("96.8 MiB, 3.2 MiB of headroom", "1,600 tokens/s, 0.625 s a step", "measured: trial 3 ok")
    for text in ("micro-batch 8", "checkpointing none", "precision bf16", *told):
        expect(tip).to_contain_text(text)
    page.locator("[data-chart=may_be_faster] svg").scroll_into_view_if_needed()
    page.locator("[data-chart=may_be_faster] .mark-symbol path").first.hover(force=True)
    told = ("fits: 97 %", "tokens/s (95 %: ", "not measured: not tried yet; faster than the answer: 25 %")
    for text in ("micro-batch 8", *told):
        expect(tip).to_contain_text(text)


def test_a_search_shows_what_is_left_and_where_its_time_went() -> None:
    report = report_of(search_findings())
    plots = {plot.name: plot.panels[0].to_spec() for plot in report.plots}
    likely = plots["may_be_faster"]["data"]["values"]
    assert [line["chance"] for line in likely] == ["25 %"] * 2 and likely[0]["low"] < likely[0]["middle"]
    notes = [note for section in report.sections for note in section.notes]
    assert "This session took 6 s: 31 % predicting, 46 % trials, 15 % verification, 8 % overhead." in notes
    assert "Each of the 17 that were not measured, and why, is in never_run.csv." in notes


@needs_browser
def test_a_plan_shows_the_memory_of_the_configuration_under_the_pointer(shown: Shown) -> None:
    page = shown(plan_findings(), 1440, "light")
    [map_of_card, memory] = page.locator("section[data-choice] [data-chart]").all()[:2]
    texts = memory.locator(".amounts_marks text")
    start = texts.all_text_contents()
    expect(memory.locator("output")).to_contain_text("micro-batch 8, checkpointing none, precision bf16")
    map_of_card.locator(".cells_marks path").first.hover(force=True)
    expect(memory.locator("output")).to_contain_text("micro-batch 1, checkpointing none, precision bf16")
    peak = made_up(CHOICES[1])[0] / MIB
    expect(texts.nth(1)).to_have_text(f"{peak - 5:,.0f}")
    assert texts.first.text_content() == start[0] == "5"
    map_of_card.locator("svg").press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(memory.locator("output")).to_contain_text("micro-batch 1, checkpointing every_layer, precision bf16")


@needs_browser
def test_the_cards_of_a_plan_are_buttons_and_its_heat_map_has_controls(shown: Shown) -> None:
    page = shown(plan_findings(), 1440, "light")
    sections = page.locator("section[data-choice]")
    assert [section.is_visible() for section in sections.all()] == [True, False, False]
    page.get_by_role("button", name=LONG).press("Enter")
    assert [section.is_visible() for section in sections.all()] == [False, True, False]
    chart = sections.nth(1).locator("[data-chart]").first
    box = chart.locator("svg").bounding_box()
    assert box is not None and box["width"] > 600
    texts = chart.locator(".sizes_marks text")
    bf16 = texts.all_text_contents()
    chart.get_by_role("combobox", name="precision").select_option("fp32")
    expect(texts.first).not_to_have_text(bf16[0])
    cell = chart.locator(".cells_marks path").first
    shade = cell.get_attribute("fill")
    slider = chart.get_by_role("slider")
    slider.evaluate("slider => { slider.value = 10; slider.dispatchEvent(new Event('input')); }")
    expect(cell).not_to_have_attribute("fill", str(shade))
    slider.evaluate("slider => { slider.value = 40; slider.dispatchEvent(new Event('input')); }")
    expect(chart.locator("output")).to_contain_text("At 40")
    fitting = [row for row in plan_findings().cards[1].rows if row.peak_bytes <= 40 * MIB]
    lean = max(fitting, key=lambda row: (row.tokens_per_second, -row.peak_bytes))
    expect(chart.locator("output")).to_contain_text(f"start with {label(lean.choice)}")
    slider.evaluate("slider => { slider.value = 0; slider.dispatchEvent(new Event('input')); }")
    expect(chart.locator("output")).to_contain_text("nothing that was predicted fits")
    assert chart.locator(".starts_marks path").count() == 0


@needs_browser
def test_a_plan_of_several_effective_batches_has_buttons_for_cards_and_batches(shown: Shown) -> None:
    one = plan_findings()
    cards = tuple(replace(card, effective_batch_size=size) for card in one.cards[:2] for size in (16, 32))
    page = shown(replace(one, cards=cards), 1440, "light")
    visible = page.locator("section[data-choice]:visible h2")
    assert visible.all_inner_texts() == ["Card A (effective batch 16)"]
    page.get_by_role("button", name="effective batch 32").press("Enter")
    assert visible.all_inner_texts() == ["Card A (effective batch 32)"]
    page.get_by_role("button", name=LONG).click()
    assert visible.all_inner_texts() == [f"{LONG} (effective batch 32)"]


@needs_browser
def test_a_table_is_filtered_by_all_words(shown: Shown) -> None:
    page = shown(plan_findings(), 1440, "light")
    table = page.locator("section[data-choice] .table").first
    table.get_by_role("searchbox").fill("bf16 every_layer")
    lines = [line for line in table.locator("tbody tr").all() if line.is_visible()]
    assert len(lines) == 5 and all({"bf16", "every_layer"} <= set(line.inner_text().split()) for line in lines)
    table.get_by_role("searchbox").fill("bf17")
    expect(page.locator("section[data-choice] .table[data-nothing]")).to_have_count(1)


@needs_browser
def test_values_that_no_prediction_has_are_said_to_have_none(shown: Shown) -> None:
    [card, *_] = plan_findings().cards
    rows = [
        replace(row, choice={**row.choice, "loss": ("fused", "plain")[number % 3 % 2]})
        for number, row in enumerate(card.rows)
    ]
    left = tuple(row for row in rows if (row.choice["precision"], row.choice["loss"]) != ("fp32", "fused"))
    page = shown(replace(plan_findings(), cards=(replace(card, rows=left),)))
    chart = page.locator("[data-chart]").first
    chart.get_by_role("combobox", name="loss").select_option("fused")
    chart.get_by_role("combobox", name="precision").select_option("fp32")
    assert chart.get_attribute("data-nothing") is not None
    chart.get_by_role("combobox", name="loss").select_option("plain")
    assert chart.get_attribute("data-nothing") is None and chart.locator(".cells_marks path").count()


@needs_browser
def test_a_page_leads_to_its_run_its_files_its_terms_and_the_answers_settings(shown: Shown, tmp_path: Path) -> None:
    (tmp_path / "trials.csv").touch()
    (tmp_path / "trial 1").mkdir()
    source = Source(folder=tmp_path, uri="sqlite:////store/mlflow.db", experiment_id="7", run_id="abc")
    page = shown(search_findings(), source=source)
    assert "gpt2-nano, sequences of 1,024 tokens" in page.title() and page.title() != page.locator("h1").inner_text()
    run = page.get_by_role("link", name="MLflow run")
    assert run.get_attribute("href") == "http://127.0.0.1:5000/#/experiments/7/runs/abc"
    assert (
        page.locator("#files code").inner_text().strip() == "mlflow ui --backend-store-uri sqlite:////store/mlflow.db"
    )
    assert page.locator("#files a").all_inner_texts()[2:] == ["trials.csv"]
    terms = page.locator("#terms dt").all_inner_texts()
    assert {"bound", "headroom", "not tried yet"} <= set(terms) and "held-out loss" not in terms
    expect(page.get_by_text("What fits another card")).to_contain_text("fitproof plan --config best.yaml --gpu t4")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    copy = page.locator(".headlines").get_by_role("button", name="copy")
    copy.click()
    expect(page.get_by_role("button", name="copied")).to_be_visible()
    assert yaml.safe_load(page.evaluate("navigator.clipboard.readText()")) == BEST
    server = replace(source, uri="https://mlflow.example/")
    assert (server.address, server.ui_command) == ("https://mlflow.example/#/experiments/7/runs/abc", None)


@needs_browser
def test_a_table_says_that_it_has_more_columns_until_its_end(shown: Shown) -> None:
    area = shown(plan_findings(), 390).locator("section[data-choice]:visible .scroll").first
    expect(area).to_have_attribute("data-more", "")
    area.evaluate("area => { area.scrollLeft = area.scrollWidth; }")
    expect(area).not_to_have_attribute("data-more", "")


@given(st.floats(0, 1e9))
def test_sizes_have_no_exponent_and_their_unit_with_them(mib: float) -> None:
    assert re.fullmatch(r"(&lt; )?[\d.,]+\N{NO-BREAK SPACE}MiB", sentence(mib_text(mib)))


@pytest.mark.matrix(2)
@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (768, "dark"), (390, "light")])
@pytest.mark.parametrize("findings", [search_findings, plan_findings])
def test_a_page_fits_its_screen(findings: Callable[[], Findings], width: int, scheme: str, shown: Shown) -> None:
    page = shown(findings(), width, scheme)
    for button in [*page.locator(".choices button").all(), None]:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for chart in page.locator("[data-chart] svg:visible").all():
            box = chart.bounding_box()
            assert box is not None and box["width"] > 250 and box["x"] + box["width"] <= width
        assert not [text for text in page.locator(".role-legend-label text").all_text_contents() if text.endswith("…")]
        if button is not None:
            button.click()
    ink = page.locator("[data-chart] svg:visible .role-axis-label text").first
    assert ink.evaluate("text => getComputedStyle(text).fill") == (
        "rgb(27, 31, 36)" if scheme == "light" else "rgb(230, 234, 239)"
    )


@needs_browser
def test_a_page_prints_every_card(shown: Shown) -> None:
    page = shown(plan_findings(), 1440, "light")
    sections = page.locator("section[data-choice]").all()
    before = [section.is_visible() for section in sections]
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert all(section.is_visible() for section in sections) and page.locator("details:not([open])").count() == 0
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert [section.is_visible() for section in sections] == before and not all(before)
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.pdf().startswith(b"%PDF")
