"""A job that is running: its page in a real browser, and the progress of a search in a terminal and in a pipe."""

import re
import threading
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from rich.console import Console
from test_pages import needs_browser, plan_findings, search_findings

from pipeline.base.results import MemoryUse, Outcome, Result, StepRecord
from pipeline.base.units import MIB
from pipeline.config.experiment import make_experiment
from pipeline.config.variants import EntryPoint, load_entry_point
from pipeline.jobs.live_page import SHARE, LivePage
from pipeline.jobs.search_progress import PREDICTING, TRIALS, VERIFICATION, SearchClock, SearchProgress
from pipeline.report.comparison import ComparisonFindings
from pipeline.report.findings import report_of
from pipeline.report.page import to_html
from pipeline.runtime.observer import Run
from pipeline.searching.trials import Proposal
from pipeline.training.metrics import Row, Summary, summarize

TINY = {"model": "gpt2-nano", "device": "cpu", "micro_batch_size": 2, "effective_batch_size": 8, "num_steps": 10}


class FakeClock:
    """Seconds that pass only when they are set to."""

    seconds = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.seconds


def record(step: int) -> StepRecord:
    """Return an optimizer step of a made-up run."""
    made_up: dict[str, Any] = {"grad_norm": 1.0, "seconds": 0.1, "tokens": 8, "positions": 8, "learning_rate": 1e-3}
    return StepRecord(step=step, loss=8.5, skipped=False, **made_up)


def run(name: str, labels: Mapping[str, str]) -> Run:
    """Return a run that is not carried out."""
    return Run(name=name, runnable=make_experiment(TINY, "main"), folder=Path("nowhere"), labels=labels)


def result() -> Result:
    """Return the result of a run of four steps."""
    memory = MemoryUse(
        peak_allocated_bytes=100 * MIB,
        peak_process_bytes=1000 * MIB,
    )
    steps = tuple(map(record, range(4)))
    return Result(outcome=Outcome.OK, steps=steps, memory=memory, seconds_total=2.0)


def progress(console: Console, between_runs: Callable[[], None] = lambda: None) -> SearchProgress:
    """Return the progress of a search of ten trials."""
    return SearchProgress(console, 10, SearchClock(), between_runs, lambda number: None)


def test_the_time_of_a_session_is_divided_among_what_runs() -> None:
    now = FakeClock()
    clock = SearchClock(now)
    with clock.during(PREDICTING):
        now.seconds += 256
    for seconds, change in (
        (1.0, lambda: clock.begin(PREDICTING)),
        (2.0, lambda: clock.end(PREDICTING)),
        (4.0, lambda: clock.begin(TRIALS)),
        (8.0, lambda: clock.begin(TRIALS)),  # of another worker, at the same time
        (16.0, lambda: clock.end(TRIALS)),
        (32.0, lambda: clock.end(TRIALS)),
        (64.0, lambda: clock.begin(VERIFICATION)),
    ):
        now.seconds += seconds
        change()
    now.seconds += 128
    assert clock.seconds == {"predicting": 256 + 2, "trials": 56, "verification": 128, "overhead": 1 + 4 + 64}


def test_a_page_is_written_again_once_the_last_one_is_a_small_share_of_the_time(tmp_path: Path) -> None:
    now, made = FakeClock(), []
    page = LivePage(tmp_path, Console(), now)

    def findings() -> Any:
        made.append(now.seconds)
        now.seconds += 0.5  # making a page takes so long
        return search_findings()

    for seconds in (0.0, 10.0, 0.5 / SHARE - 1, 0.5 / SHARE, 0.5 / SHARE + 1, 100.0):
        now.seconds = max(now.seconds, seconds)
        page.write(findings, "3 of at most 12 trials")
    assert made == [0.0, 0.5 / SHARE + 1, 100.0][: len(made)] and len(made) >= 2
    text = page.file.read_text()
    assert "Running: 3 of at most 12 trials, written at" in text and "data-reload-seconds" in text
    assert "data-reload-seconds" not in to_html(report_of(search_findings())).partition("<body>")[0]


def test_an_error_of_the_page_is_said_once_and_the_job_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def findings() -> Any:
        raise OSError("no space left on device")

    page = LivePage(tmp_path, Console())
    for _ in range(3):
        page.write(findings, "1 of 3 variants")
    assert capsys.readouterr().out == "the page of the running job is not written: no space left on device\n"
    assert not page.file.exists()


def rows_of(plan: EntryPoint) -> list[Row]:
    """Return rows of the variants of an entry point, with made-up results."""
    return [
        Row(
            comparison=variant.comparison,
            name=variant.name,
            is_baseline=variant.is_baseline,
            params=variant.experiment.params(),
            result=result(),
            skipped=None,
            metrics=summarize(result(), variant.experiment.effective_batch_size, 1, 1.0),
        )
        for variant in plan.variants
    ]


@pytest.mark.parametrize("entry", ["precision", "accumulation", "checkpointing", "combined", "levers"])
def test_a_comparison_has_a_page_after_its_first_runs(entry: str) -> None:
    plan = load_entry_point(entry, {"model": "gpt2-nano", "device": "cpu"})
    rows = rows_of(plan)
    for number in {1, 2, len(rows) - 1}:
        findings = ComparisonFindings(
            entry=entry, question=plan.question, rows=tuple(rows[:number]), environment={}, sections=plan.sections
        )
        assert rows[number - 1].name in to_html(report_of(findings), f"{number} of {len(rows)} variants")


@needs_browser
def test_a_running_page_loads_itself_again_and_keeps_its_readers_place(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"

    def write(running: str | None) -> None:
        file.write_text(to_html(report_of(plan_findings()), running))

    write("1 of 3")
    page = browser.new_context(viewport={"width": 1440, "height": 500}, offline=True).new_page()
    page.add_init_script("window.setInterval = reload => { window.intervalPasses = () => setTimeout(reload); }")
    page.goto(f"file://{file}")
    drawn = page.locator("html[data-drawn]")
    drawn.wait_for(state="attached")
    page.evaluate("document.querySelectorAll('.choices button')[2].click(); scrollTo(0, 300)")
    slider = page.locator("section:visible input[type=range]")
    slider.evaluate("slider => { slider.value = 12; slider.dispatchEvent(new Event('input')); }")
    moved = slider.input_value()  # the next step of the slider
    write("2 of 3")
    page.evaluate("intervalPasses()")
    expect(page.locator(".running")).to_contain_text("2 of 3", timeout=30_000)
    drawn.wait_for(state="attached")
    write(None)
    page.evaluate("intervalPasses()")
    expect(page.locator(".running")).to_have_count(0, timeout=30_000)
    drawn.wait_for(state="attached")
    assert page.get_by_role("button", pressed=True).inner_text() == "Card C"
    assert slider.input_value() == moved and page.evaluate("scrollY") == 300


def follow(shown: SearchProgress, seen: Callable[[], None] = lambda: None) -> None:
    """Emit the events of a search that measures one configuration and verifies it."""
    findings = search_findings()
    shown.runs(findings.rows)
    for _ in range(2):  # two workers
        shown.proposed(Proposal(findings.rows[0].choice, bound=0.125))
    shown.started(run("trial 4: micro-batch 2", {"trial": "4"}))
    shown.step(record(4))
    seen()
    shown.finished(result(), Summary({}))
    shown.trial("trial 4: micro-batch 2", findings.rows[0])
    shown.started(run("verification: answer", {"verification": "answer"}))
    shown.finished(result(), Summary({}))
    shown.verified("verification: answer: micro-batch 8", result())


def test_a_search_prints_plain_lines_without_a_terminal() -> None:
    output, calls = StringIO(), []
    with progress(Console(file=output, width=200), lambda: calls.append(1)) as shown:
        follow(shown)
    assert output.getvalue().splitlines() == [
        "so far: 1,600 tokens/s, at most 12.5 % slower than the best possible",
        "trial 4: micro-batch 2: ok, 84.0 MiB, 800 tokens/s",
        "verification: answer: micro-batch 8: ok in 2.0 s",
    ]
    assert len(calls) == 2


def test_a_terminal_shows_the_incumbent_the_bound_and_the_runs_of_all_workers() -> None:
    output = StringIO()
    with progress(Console(file=output, width=100, force_terminal=True, color_system=None)) as shown:

        def worker() -> None:
            shown.started(run("trial 5: micro-batch 4", {"trial": "5"}))
            shown.step(record(0))

        def look() -> None:
            thread = threading.Thread(target=worker)
            thread.start()
            thread.join()
            shown._live.refresh()

        follow(shown, look)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    assert "so far: 1,600 tokens/s, at most 12.5 % slower than the best possible, 96.8 MiB: micro-batch" in text
    assert "step 5 of at most 10, loss 8.5000: trial 4: micro-batch 2" in text
    assert "step 1 of at most 10, loss 8.5000: trial 5: micro-batch 4" in text
    assert " 3/10 " in text and max(map(len, text.splitlines())) <= 100
