"""The MLflow UI and the reports, as a person sees them: real entry points' runs in a real browser.

FITPROOF_SCREENSHOTS=docs/images keeps what was seen; README shows it.
"""

import os
import re
import sqlite3
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from conftest import CHROMIUM, pairs
from finished import Done
from mlflow import MlflowClient
from playwright.sync_api import Browser, Locator, Page, expect
from processes import free_port, started
from project import Project

from pipeline.tracking.ui import last_used

NO_ASSISTANT = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
SECONDS = 60
SECONDS_TO_DRAW = 5
"""Until charts are drawn whose data MLflow's pages fetch one after the other."""
COLUMNS = ("memory/peak_allocated_mib", "speed/tokens_per_second", "loss/final", "micro_batch_size", "checkpointing")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def project(finished: tuple[Project, Done]) -> Project:
    return finished[0]


@pytest.fixture(scope="module")
def view(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the MLflow UI on a copy of the finished project's store, and give the address with which it opens.

    Without the jobs that other tests have added, so that the search is the last one with runs.
    """
    copy = Project.copy(tmp_path_factory.mktemp("ui"), with_store=False)
    with (
        closing(sqlite3.connect(project.folder / "mlflow.db")) as store,
        closing(sqlite3.connect(copy.folder / "mlflow.db")) as other,
    ):
        store.backup(other)  # another test may be writing there
    last = project.parent_of("search").info.start_time
    for run in copy.runs():
        if run.info.start_time > last and run.data.tags["technique"] != "search":
            MlflowClient(copy.store).delete_run(run.info.run_id)
    without_screen = Project(copy.folder, {"DISPLAY": "", "WAYLAND_DISPLAY": ""})
    words = ("python", "-m", "pipeline.tracking.ui", str(free_port()))
    with started(without_screen, *words, stderr=subprocess.DEVNULL) as ui:
        lines = iter(ui.stdout or [])
        shown = next(line for line in lines if line.startswith("the runs: "))
        threading.Thread(target=lambda: deque(lines, maxlen=0), daemon=True).start()
        yield shown.removeprefix("the runs: ").strip()


@pytest.fixture(scope="module")
def address(view: str) -> str:
    """Give the address of the list of runs, as MLflow itself shows it."""
    return re.sub(r"experiments/\d+/runs.*", "experiments/0/runs", view)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1600, "height": 1000})
    context.add_init_script(NO_ASSISTANT)
    context.set_default_timeout(SECONDS * 1000)
    expect.set_options(timeout=SECONDS * 1000)
    yield context.new_page()
    context.close()


def keep(page: Page, name: str) -> None:
    """Keep a picture of the page where screenshots are wanted, without the path of this machine."""
    folder = os.environ.get("FITPROOF_SCREENSHOTS")
    if folder:
        page.wait_for_timeout(SECONDS_TO_DRAW * 1000)
        workspaces = [page.get_by_text(re.compile("^Path: "))]
        page.screenshot(path=Path(folder) / f"{name}.png", mask=workspaces, mask_color="white")


def row(page: Page, name: str) -> Locator:
    """Return the line of a run in the list, its left part, with its name and checkbox."""
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True)).first


def unfold(page: Page, address: str, parent: str) -> None:
    """Open the list of runs and show a parent's children."""
    page.goto(address)
    row(page, parent).get_by_role("button").first.click()
    row(page, "all three").wait_for()


def test_it_opens_on_the_experiment_that_was_used_last(tmp_path: Path) -> None:
    client = MlflowClient(Project.copy(tmp_path).store)
    first, second = (client.create_experiment(name) for name in ("first", "second"))
    for number, experiment in enumerate((first, second, first)):
        client.create_run(experiment, start_time=number)
    assert last_used(client) == first


def test_it_opens_with_the_charts_of_the_last_job(page: Page, project: Project, view: str) -> None:
    trials = [name for name in project.children_of(project.parent_of("search")) if name.startswith("trial")]
    page.goto(view)
    for name in ("memory/peak_allocated_mib", "speed/tokens_per_second", "Parallel Coordinates", "step/loss"):
        expect(page.get_by_text(name, exact=True).first).to_be_attached()
    expect(page.locator(".js-plotly-plot .bars .point").first).to_be_visible()
    for name in trials:
        expect(page.get_by_role("link", name=name, exact=True)).to_be_visible()
    expect(page.get_by_role("link", name=str(project.parent_of("combined").info.run_name))).to_have_count(0)
    keep(page, "mlflow_charts")
    page.get_by_text("step/loss", exact=True).first.hover()
    page.mouse.wheel(0, 600)
    expect(page.get_by_text("memory/over_the_step_mib", exact=True).first).to_be_visible()
    expect(page.locator(".js-plotly-plot .scatterlayer .lines").first).to_be_visible()
    keep(page, "mlflow_lines")


def test_jobs_and_their_runs_share_columns(page: Page, project: Project, view: str) -> None:
    page.goto(view.replace("CHART", "TABLE"))
    trial = next(name for name in project.children_of(project.parent_of("search")) if name.startswith("trial 1"))
    expect(row(page, trial)).to_be_visible()
    for name in COLUMNS:
        expect(page.get_by_role("columnheader", name=name, exact=True).first).to_be_attached()
    keep(page, "mlflow_runs")
    page.get_by_placeholder("metrics.rmse").fill("params.`answer/micro_batch_size` != ''")
    page.keyboard.press("Enter")
    expect(row(page, trial)).to_have_count(0)
    for entry in ("search", "combined"):
        parent = project.parent_of(entry)
        expect(row(page, str(parent.info.run_name))).to_be_visible()
        peak = str(parent.data.metrics["memory/peak_allocated_mib"])[:8]
        expect(page.get_by_role("gridcell", name=re.compile(rf"^{re.escape(peak)}")).first).to_be_visible()
    keep(page, "mlflow_jobs")


def test_runs_are_compared_with_charts(page: Page, project: Project, address: str) -> None:
    unfold(page, address, str(project.parent_of("combined").info.run_name))
    for name in ("fp32", "precision", "accumulation", "all three"):
        row(page, name).get_by_role("checkbox").click()
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_role("heading", name="Comparing 4 Runs")).to_be_visible()
    expect(page.locator(".js-plotly-plot .parcoords").first).to_be_visible()
    for name in ("micro_batch_size", "checkpointing", "fp32", "all three"):
        expect(page.get_by_text(name, exact=True).first).to_be_attached()
    keep(page, "compare")


def test_a_run_says_what_was_asked_and_found(page: Page, project: Project, address: str) -> None:
    parent = project.parent_of("search")
    page.goto(f"{address}/{parent.info.run_id}")
    expect(
        page.get_by_text("What is the fastest way to train gpt2-nano at an effective batch of 8").first
    ).to_be_visible()
    expect(page.get_by_text("The fastest that fits 64.0 MiB at an effective batch of 8").first).to_be_visible()


def test_the_report_is_shown_among_the_artifacts(page: Page, project: Project, address: str) -> None:
    parent = project.parent_of("search")
    page.goto(f"{address}/{parent.info.run_id}/artifacts/report.html")
    report = page.frame_locator("iframe")
    expect(report.get_by_role("heading", level=1)).to_contain_text("What is the fastest way to train gpt2-nano")
    [file] = project.folder.glob("runs/*-search-*/ranking.csv")
    num_runs = len(file.read_text().splitlines()) - 1
    expect(report.locator("table.sortable").nth(1).locator("tbody tr")).to_have_count(num_runs)
    expect(report.locator("html[data-drawn]")).to_be_attached()
    expect(report.locator("[data-chart=memory_against_throughput] .measured_marks path").first).to_be_visible()
    keep(page, "report")


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("entry", "screen"),
    pairs(
        ["search", "accumulation", "checkpointing", "combined", "precision", "profiling"],
        [(390, "dark"), (1440, "light")],
    ),
)
def test_a_report_fits_its_screen(entry: str, screen: tuple[int, str], browser: Browser, project: Project) -> None:
    width, scheme = screen
    [folder] = project.folder.glob(f"runs/*-{entry}-*")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)  # type: ignore[arg-type]
    page = context.new_page()
    failures: list[str] = []
    page.on("requestfailed", lambda request: failures.append(request.url))
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.goto(f"file://{folder}/report.html")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("html[data-drawn]").wait_for(state="attached")
    assert page.locator("[data-chart]").count() == page.locator("[data-chart] svg").count() > 0
    for chart in page.locator("[data-chart] svg").all():
        box = chart.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width
    assert (folder / "report.html").stat().st_size < 2e6
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 29)")
    assert not failures
    context.close()


def test_a_table_is_sorted_by_any_column(browser: Browser, project: Project) -> None:
    [folder] = project.folder.glob("runs/*-combined-*")
    page = browser.new_page()
    page.goto(f"file://{folder}/report.html")
    table = page.locator("table.sortable").first
    headings = table.locator("th").all_inner_texts()

    def column(heading: str) -> list[str]:
        return [
            line.locator("td").nth(headings.index(heading)).inner_text() for line in table.locator("tbody tr").all()
        ]

    button = table.get_by_role("button", name="peak MiB")
    for descending in (False, True):
        button.click()
        sizes = [float(text.replace(",", "")) for text in column("peak MiB")]
        assert sizes == sorted(sizes, reverse=descending)
    table.get_by_role("button", name="memory %").click()
    assert column("memory %")[-1] == ""  # the baseline has none
    page.close()
