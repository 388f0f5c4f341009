"""Comparisons on a made-up machine: disturbed runs, repeats, intervals, interruptions; and comparisons of many runs."""

import json
import math
import random
import re
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pandas as pd
import pytest
from conftest import TINY
from project import as_words, new_store
from test_metrics import record, result
from test_report import rows

from pipeline.base.results import Outcome, Result, StepRecord
from pipeline.base.units import MIB
from pipeline.cli import main
from pipeline.config.given import dotted
from pipeline.jobs import comparison
from pipeline.report.comparison import ComparisonFindings
from pipeline.report.sections import epoch
from pipeline.runtime.rank import Work
from pipeline.runtime.run import Execute
from pipeline.tracking import history
from pipeline.training.loop import Stop, never_stop
from pipeline.training.metrics import Row
from pipeline.training.time_differences import ERROR, MARGIN, time_change, with_times
from pipeline.training.timing import Timing, combined, noise_of, timing_of

OWN = """
question: What do they cost?
sections: [waterfall]
comparisons:
  ladder:
    baseline: none
    variants:
      none: {}
      same: {learning_rate: 0.001}
      every_layer: {learning_rate: 0.001, checkpointing: every_layer}
"""
SECONDS = {"none": 1.0, "same": 1.0, "every_layer": 1.3}


class MadeUpMachine:
    """Runs experiments without training: `seconds` gives the time of a step of a variant's first, second, ... run."""

    def __init__(self, seconds: Callable[[str, int], float], num_until_interrupted: float = math.inf) -> None:
        self._seconds, self._num_until_interrupted = seconds, num_until_interrupted
        self.names: list[str] = []

    def __call__(
        self,
        runnable: Any,
        log_file: Path,
        observers: Sequence[Any] = (),
        *,
        work: Work | None = None,
        stop: Stop = never_stop,
        cancelled: threading.Event | None = None,
    ) -> Result:
        settings = runnable.settings
        plain = "none" if settings.learning_rate != 0.001 else "same"
        name = "every_layer" if settings.checkpointing == "every_layer" else plain
        self.names.append(name)
        is_interrupted = len(self.names) > self._num_until_interrupted
        seconds, steps, times = self._seconds(name, self.names.count(name)), [], list[float]()
        for number in range(settings.num_steps):
            steps.append(record(number, seconds=seconds * (1 + 0.01 * (number % 3))))
            times.append(steps[-1].seconds / steps[-1].positions)
            for observer in observers:
                observer.step(steps[-1])
            if stop(times):
                break
        made = result()
        peak = (60 if name == "every_layer" else 100) * MIB
        assert made.memory is not None
        return replace(
            made,
            outcome=Outcome.INTERRUPTED if is_interrupted else Outcome.OK,
            steps=() if is_interrupted else tuple(steps),
            memory=None if is_interrupted else replace(made.memory, peak_allocated_bytes=peak),
            seconds_total=sum(one.seconds for one in steps),
        )


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Give a function that runs a command in a folder of its own on a made-up machine; it returns code and output."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "own.yaml").write_text(OWN)

    def run_it(machine: Execute | None, entry: str = "own", **settings: str) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            patch.setattr("pipeline.runtime.run.execute", machine)
            tiny = {name: str(value) for name, value in dotted(TINY)} | {"corpus": "quick_fox", "num_steps": "9"}
            code = main([entry, *as_words({**tiny, **settings} if entry == "own" else settings)])
        return code, " ".join(capsys.readouterr().out.split())

    return run_it


def runs() -> dict[str, Any]:
    """Return the runs of the tracking store by name."""
    client = mlflow.MlflowClient()
    found = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return {str(run.info.run_name): run for run in found}


def test_one_disturbed_run_of_the_baseline_is_no_finding(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    machine = MadeUpMachine(lambda name, count: SECONDS[name] * (18 if (name, count) == ("none", 1) else 1))
    code, out = run(machine)
    assert code == 0
    assert machine.names == ["none", "same", "every_layer"] * 2 + ["none"], "interleaved, and the slowed one once more"
    assert "every_layer uses the least memory: 40 % less memory and 30 % more time per sample (+" in out
    assert "None is faster than none beyond noise." in out
    assert "(none: 1 of 3)" in out and "running 3 variants again" in out
    metrics = runs()["every_layer"].data.metrics
    assert metrics["speed/time_overhead_low_percent"] < 30 < metrics["speed/time_overhead_high_percent"] < 40
    assert runs()["none"].data.metrics["speed/seconds_per_step"] == pytest.approx(1.01, rel=0.02)
    [page] = tmp_path.glob("runs/*/report.html")
    assert not re.search(r"% less time|e\+0[23]", page.read_text().partition("<script")[0])
    [findings] = tmp_path.glob("runs/*/findings.json")
    code, again = run(None, "report", folder=str(findings.parent))
    assert code == 0 and "30 % more time per sample" in again


def test_a_single_run_of_each_says_that_a_difference_may_be_noise(run: Callable[..., tuple[int, str]]) -> None:
    machine = MadeUpMachine(lambda name, count: {"none": 1.0, "same": 0.95, "every_layer": 1.05}[name])
    _, out = run(machine, repeats="0")
    assert len(machine.names) == 3
    assert "40 % less memory and no difference in time beyond noise (-" in out
    assert "None is faster than none beyond noise." in out


def test_repeats_take_no_longer_than_the_first_runs(run: Callable[..., tuple[int, str]]) -> None:
    """And one that is slowed ends after three steps, one that is steady once its median is known."""
    machine = MadeUpMachine(lambda name, count: SECONDS[name] * (10 if count == 2 else 1))
    _, out = run(machine, num_steps="60")
    seconds = [float(text) for text in re.findall(r"ok in ([\d.]+) s", out)]
    assert sum(seconds[3:]) < sum(seconds[:3]) + 70
    assert machine.names[3:6] == ["none", "same", "every_layer"]


def test_an_interrupted_job_says_so_everywhere_and_its_runs_are_compared(
    run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, out = run(MadeUpMachine(lambda name, count: SECONDS[name], num_until_interrupted=2))
    assert code == 130 and "Interrupted after 2 of 3 variants. " in out
    [parent] = [one for name, one in runs().items() if name.startswith("own")]
    assert parent.info.status == "KILLED"
    assert (parent.data.tags["outcome"], parent.data.tags["interrupted"]) == ("interrupted", "2 of 3 variants")
    assert parent.data.tags["answer"].startswith("Interrupted after 2 of 3 variants. ")
    [page] = tmp_path.glob("runs/*/report.html")
    assert "Interrupted after 2 of 3 variants" in page.read_text()
    code, out = run(None, "compare", runs=parent.info.run_id)
    assert code == 0, out
    [frame] = [pd.read_csv(file) for file in tmp_path.glob("runs/*-compare-*/comparison.csv")]
    assert dict(zip(frame["variant"], frame["baseline"], strict=True)) == {
        "none": True,
        "same": False,
        "every_layer": False,
    }
    code, _ = run(None, "compare", filter="params.model = 'gpt2-nano'")
    assert code == 0
    newest = max(tmp_path.glob("runs/*-compare-*/findings.json"), key=lambda file: file.stat().st_mtime)
    assert len(json.loads(newest.read_text())["rows"]) == 3, "the job itself is no run"


def test_a_job_that_is_interrupted_in_its_repeats_says_how_many_have_run_again(
    run: Callable[..., tuple[int, str]],
) -> None:
    code, out = run(MadeUpMachine(lambda name, count: SECONDS[name], num_until_interrupted=4))
    assert code == 130 and "Interrupted after 3 of 3 variants, 1 of 3 run again. " in out
    [parent] = [one for name, one in runs().items() if name.startswith("own")]
    assert parent.data.tags["interrupted"] == "3 of 3 variants, 1 of 3 run again"


def test_a_variant_keeps_all_of_its_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "published_type_note", lambda experiment: "its checkpoint is in bfloat16")
    for name in ("predicted_truncations", "document_lengths"):
        monkeypatch.setattr(comparison, name, lambda experiment: ())
    failed, whole = rows("ok", "ok")
    found = [replace(failed, note="killed when it was run again"), whole]
    variants = [SimpleNamespace(comparison=row.comparison, name=row.name, experiment=None) for row in found]
    plan: Any = SimpleNamespace(variants=variants)
    findings = ComparisonFindings(entry="main", question="?", rows=tuple(found), environment={})
    notes = [row.note for row in comparison._with_predictions(plan, findings).rows]
    assert notes == ["killed when it was run again; its checkpoint is in bfloat16", None]


def test_intervals_of_runs_of_another_job_are_made_anew() -> None:
    """Its job compared one variant, and so its margins hold for one."""
    found = made_up_times(4, 0.01, 0.01, 9, 0)
    timed = [
        replace(row, timings=tuple(own), metrics=own_metrics(row))
        for row, own in zip(rows("ok", *["ok"] * 3), found, strict=True)
    ]
    narrow = [replace(row, timings=()) for row in with_times(timed[:2])]
    wide = with_times([*narrow, *timed[2:]])
    assert [row.metrics[ERROR] for row in narrow] == [row.metrics[ERROR] for row in wide[:2]]
    normal = statistics.NormalDist()
    for before, after in zip(narrow, wide, strict=False):
        for row, num_compared in ((before, 1), (after, 3)):
            quantile = normal.inv_cdf(1 - 0.05 / 2 / num_compared)
            assert math.log1p(row.metrics[MARGIN] / 100) == pytest.approx(quantile * row.metrics[ERROR] / 100)


def test_all_runs_are_read_the_newest_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path))
    monkeypatch.setattr(history, "IN_A_PAGE", 2)
    client = mlflow.MlflowClient()
    parent = client.create_run("0", run_name="job")
    for number in range(5):
        tags = {"outcome": "ok", "mlflow.parentRunId": parent.info.run_id}
        client.create_run("0", start_time=1000 + number, tags=tags, run_name=str(number))
    found = history.History()
    assert [run.info.run_name for run in found.by_filter(None, None)] == ["4", "3", "2", "1", "0"]
    assert [run.info.run_name for run in found.by_id([parent.info.run_id])] == ["0", "1", "2", "3", "4"]


def made_up_times(num_variants: int, noise: float, spread: float, num_steps: int, seed: int) -> list[list[Timing]]:
    """Return the timings of two runs of each of several variants that take the same time."""
    source = random.Random(seed)

    def one() -> Timing:
        offset = source.gauss(0, noise)
        steps = [record(n, seconds=math.exp(offset + source.gauss(0, spread))) for n in range(num_steps)]
        timing = timing_of(steps, 0)
        assert timing is not None
        return timing

    return [[one(), one()] for _ in range(num_variants)]


@pytest.mark.parametrize(("noise", "spread"), [(0.003, 0.005), (0.02, 0.03), (0.06, 0.1)])
@pytest.mark.parametrize("num_steps", [1, 3, 9])
def test_intervals_hold_for_all_variants_at_once(noise: float, spread: float, num_steps: int) -> None:
    """Of variants that take the same time, at least 90 of 100 jobs find none that differs."""
    num_false = 0
    for seed in range(100):
        found = made_up_times(4, noise, spread, num_steps, seed)
        steps = rows("ok", *["ok"] * 3)
        timed = [
            replace(row, timings=tuple(own), metrics=own_metrics(row)) for row, own in zip(steps, found, strict=True)
        ]
        changes = [time_change(row) for row in with_times(timed)[1:]]
        num_false += any(change is not None and change.is_beyond_noise for change in changes)
    assert num_false <= 10


def own_metrics(row: Row) -> dict[str, float]:
    """Return metrics of the time of a row that agree with its timings only in a factor, which no difference sees."""
    assert row.result is not None
    return {"seconds_per_step": 1.0, "samples_per_second": 4.0, "peak_allocated_mib": 1.0}


def test_the_time_is_that_of_the_runs_that_count() -> None:
    disturbed = Timing(math.log(18.0), 1.5)
    noise = noise_of([[disturbed, Timing(0.0, 0.01)], [Timing(0.3, 0.01), Timing(0.31, 0.01)]])
    assert noise < 0.05
    assert combined([disturbed, Timing(0.0, 0.01)], noise).log_seconds == 0.0
    both = combined([Timing(0.0, 0.001), Timing(0.2, 0.001)], 0.003)
    assert both.log_seconds == pytest.approx(0.1) and both.error == pytest.approx(0.1), (
        "they differ more than the noise"
    )


def test_one_disturbed_step_of_nine_is_no_uncertainty_and_of_two_is() -> None:
    nine, two = (timing_of([record(n, seconds=18.0 if n == 1 else 1.0) for n in range(num)], 0) for num in (9, 2))
    assert nine is not None and two is not None
    assert (nine.error, two.error > 1) == (0.0, True)


def test_the_error_of_a_median_falls_with_the_root_of_the_number_of_steps() -> None:
    source = random.Random(0)
    nums = (81, 144, 2_500, 40_000)
    errors = [
        statistics.fmean(made.error for _ in range(9) if (made := timing_of(noisy(source, num), 0)) is not None)
        for num in nums
    ]
    for num, error in zip(nums, errors, strict=True):
        assert error == pytest.approx(0.05 * math.sqrt(math.pi / 2 / num), rel=0.3)


def noisy(source: random.Random, num: int) -> list[StepRecord]:
    """Return steps whose times differ by 5 %."""
    return [record(n, seconds=math.exp(source.gauss(0, 0.05))) for n in range(num)]


def timed(seconds: Sequence[float], margin_percent: float) -> list[Row]:
    """Return variants of 1, 2, 4, ... forward passes with these times."""
    return [
        replace(
            row,
            params={**row.params, "accumulation_steps": 2**number},
            metrics={"seconds_per_step": one, "seconds_per_step_margin_percent": margin_percent},
        )
        for number, (row, one) in enumerate(zip(rows(*["ok"] * len(seconds)), seconds, strict=True))
    ]


@pytest.mark.parametrize(
    ("seconds", "margin_percent", "is_modelled"),
    [
        ((1.1, 2.1, 4.1, 8.1), 5, [True] * 4),
        ((1.1, 2.1, 4.1, 30.0), 5, [False, False, False, True]),  # only without the last one is there a line
        ((9.0, 2.0, 4.0, 8.0), 5, [True, False, False, False]),
        ((1.1, 2.1, 4.1), 5, [False] * 3),  # through two others there is always one
        ((8.0, 4.0, 2.0, 1.0), 5, [False] * 4),  # it would have to fall
    ],
)
def test_an_epoch_has_a_model_only_where_a_line_fits(
    seconds: tuple[float, ...], margin_percent: float, is_modelled: list[bool]
) -> None:
    [table] = epoch.section(timed(seconds, margin_percent)).tables
    modelled = table.frame["s/step modelled"]
    assert modelled.notna().tolist() == is_modelled
    assert (modelled.dropna() >= 0).all()
    assert (table.note is not None and "do not lie on a line" in table.note) == (not all(is_modelled))
