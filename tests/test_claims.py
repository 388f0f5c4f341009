"""The folklore answered: verdicts follow their rules, figures are MLflow's own, and nothing is measured twice."""

import csv
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT
from folklore import capacity
from folklore.claim import (
    Check,
    Claim,
    Claimed,
    NotMeasuredError,
    Record,
    about,
    at_least,
    at_most,
    between,
    exactly,
)
from folklore.command import CLAIMS, main
from folklore.metrics import (
    fit_error_percent,
    largest_micro_batch,
    memory_saved_percent,
    slower_percent,
    smoother_percent,
)
from folklore.plan import in_random_order, plan
from folklore.scale import FULL, SHORT, TINY
from folklore.verdict import find, statements_of
from mlflow import MlflowClient
from mlflow.entities import Run

from pipeline.base.results import Outcome

TINY_WORDS = ["--device", "cpu", "--tiny"]
QUICK = ["--claims", "encoder,billion"]
"""Four configurations; those of billion exceed their budget."""


def record(outcome: Outcome = Outcome.OK, losses: Sequence[float] = (), params: str = "", **metrics: float) -> Record:
    settings = dict(word.split("=") for word in params.split())
    return Record(
        outcome=outcome, detail=None, params=settings, metrics={"final_loss": 1.0, **metrics}, losses=tuple(losses)
    )


def check(claimed: Claimed, condition: str = "always", what: str = "memory saved") -> Check:
    return Check(what=what, condition=condition, unit="%", claimed=claimed, runs=({}, {}), figure=memory_saved_percent)


def saving(*percents: float) -> list[list[Record] | NotMeasuredError]:
    """Return rounds in which a variant saved this much of 100 MiB."""
    return [[record(peak_allocated_mib=100 - p), record(peak_allocated_mib=100)] for p in percents]


@pytest.mark.parametrize(
    ("claimed", "percents", "verdict"),
    [
        (about(50, 5), (44, 46, 56), "holds, though 2 of 3 runs say otherwise"),
        (about(50, 5), (45.1, 50, 54.9), "holds"),
        (about(50, 5), (44, 44.9, 50), "does not hold, though 1 of 3 runs say otherwise"),
        (between(65, 80), (81, 82, 90), "does not hold"),
        (at_most(1), (0.5, 0.9, 0.9), "holds"),
        (at_least(5), (4, 4.5, 4.9), "does not hold"),
        (exactly(0), (0, 0, 0), "holds"),
    ],
)
def test_the_median_decides_and_contrary_runs_are_told(
    claimed: Claimed, percents: tuple[float, ...], verdict: str
) -> None:
    assert find(check(claimed), saving(*percents)).verdict == verdict


def test_what_ran_out_of_memory_is_said_and_not_a_number() -> None:
    lost = [[record(Outcome.OUT_OF_MEMORY, peak_allocated_mib=99), record(peak_allocated_mib=100)]]
    assert find(check(about(50, 5)), lost).verdict == "not measured: out_of_memory"
    assert find(check(about(50, 5)), [NotMeasuredError("not run yet")]).verdict == "not measured: not run yet"
    assert find(check(about(50, 5)), [*lost, *saving(48, 49)]).samples == pytest.approx((48, 49))


def test_a_statement_tells_the_conditions_under_which_it_holds() -> None:
    claim = Claim(name="half", text="It saves half", checks=lambda scale: iter(()))
    small, large = check(about(50, 5), "batch 2"), check(about(50, 5), "batch 32")
    other = check(about(50, 5), "batch 2", "time saved")
    findings = [find(small, saving(50)), find(other, saving(1)), find(large, saving(20))]
    memory, time = statements_of(claim, findings)
    assert (memory.claimed, memory.measured) == ("50 ± 5 %", "20 to 50 %")
    assert memory.verdict == "holds only in 1 of 2 conditions (batch 2)"
    assert time.verdict == "does not hold: measured 1 % against 50 ± 5 %"
    (both,) = statements_of(claim, [findings[0], find(large, [NotMeasuredError("out_of_memory")])])
    assert both.verdict == "holds; 1 of 2 conditions not measured: out_of_memory"
    (none,) = statements_of(claim, [find(small, [NotMeasuredError("out_of_memory")])])
    assert (none.measured, none.verdict) == ("", "not measured: out_of_memory")


def test_figures_follow_from_what_a_run_recorded() -> None:
    slow, fast = record(samples_per_second=8.0), record(samples_per_second=10.0)
    assert slower_percent([slow, fast]) == pytest.approx(25)
    calm, wild = record(losses=[4, 3.5, 3.5, 3]), record(losses=[4, 3, 3, 2])
    assert smoother_percent([calm, wild]) == pytest.approx(50)
    fits = record(params="micro_batch_size=4")
    beyond = record(Outcome.OUT_OF_MEMORY, params="micro_batch_size=8")
    assert (largest_micro_batch([fits, beyond]), largest_micro_batch([beyond])) == (4, 0)
    with pytest.raises(NotMeasuredError, match="diverged"):
        largest_micro_batch([record(Outcome.DIVERGED, params="micro_batch_size=8")])
    exact = [record(params=f"accumulation_steps={n}", seconds_per_step=1 + n / 10) for n in (1, 2, 4, 8)]
    assert fit_error_percent(exact) == pytest.approx(0, abs=1e-6)
    bent = [record(params=f"accumulation_steps={n}", seconds_per_step=1 + n * n / 10) for n in (1, 2, 4, 8)]
    assert fit_error_percent(bent) > 20


@pytest.mark.parametrize("scale", [FULL, SHORT, TINY], ids=lambda scale: scale.name)
def test_every_claim_can_be_planned_at_every_scale(scale: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "fitting", lambda scale, settings: [1])
    checks = plan(list(CLAIMS.values()), replace(scale, device="cpu"), 3)  # type: ignore[type-var]
    reasons = {one.reason for one in checks if one.reason}
    assert all("budget cannot be more than the device's memory" in reason for reason in reasons), reasons
    assert scale is not TINY or not reasons
    todo = in_random_order(checks, known=())
    keys = [key for key, _ in todo]
    assert len(keys) == len(set(keys)) and len(keys) % 3 == 0
    seeds = [experiment.settings.seed for _, experiment in todo]
    assert seeds == sorted(seeds)
    assert in_random_order(checks, known=keys) == []
    first, second = ([e.effective_batch_size for _, e in todo if e.settings.seed == seed] for seed in (0, 1))
    assert first != second and sorted(first) == sorted(second)


def test_figures_are_those_of_mlflow_and_more_runs_measure_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "")  # which the command sets, and this takes back
    words = [*TINY_WORDS, *QUICK, "--folder", str(tmp_path), "--kept", str(tmp_path / "kept")]
    assert main([*words, "--runs", "1"]) == 0
    assert runs_begun(capsys.readouterr().out) == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    assert main([*words, "--runs", "2"]) == 0
    assert runs_begun(capsys.readouterr().out) == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    assert main([*words, "--runs", "2"]) == 0
    assert runs_begun(capsys.readouterr().out) == []

    runs = children(tmp_path / "kept")
    assert len(runs) == 8
    peaks = {run.data.params["checkpointing"]: run.data.metrics["peak_allocated_mib"] for run in runs if stack(run)}
    (found,) = (row for row in rows(tmp_path) if (row["claim"], row["figure"]) == ("encoder", "memory saved"))
    assert float(found["median"]) == pytest.approx(100 * (1 - peaks["every_layer"] / peaks["none"]), rel=1e-4)
    assert found["runs"] == "2"
    assert {run.data.tags["outcome"] for run in runs if not stack(run)} == {"over_budget"}
    assert [row["median"] for row in rows(tmp_path) if row["claim"] == "billion"] == ["0", "0"]
    (page,) = tmp_path.glob("claims_cpu_*.md")
    text = page.read_text()
    assert "| runs that complete | [2](#billion) | 100 % | 0 % | does not hold: measured 0 % against 100 % |" in text
    assert re.search(r"width 256, budget 80MiB \| over_budget \| 2 \| its peak of [\d.]+ MiB is over the budget", text)
    assert re.search(r"\| torch \| \d", text) and (tmp_path / f"{page.stem}.png").stat().st_size > 10_000


def test_without_time_nothing_runs_and_the_table_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "")
    words = [*TINY_WORDS, *QUICK, "--folder", str(tmp_path), "--kept", str(tmp_path / "kept")]
    assert main([*words, "--minutes", "1e-9"]) == 0
    assert "the same command goes on with the other 12 runs" in capsys.readouterr().out
    assert {row["verdict"] for row in rows(tmp_path)} == {"not measured: not run yet"}


@pytest.mark.slow
def test_interrupted_or_killed_the_same_command_goes_on(tmp_path: Path) -> None:
    words = [*TINY_WORDS, *QUICK, "--folder", str(tmp_path), "--kept", str(tmp_path / "kept")]
    command = [str(ROOT / "benchmarks" / "gpu" / "claims.sh"), *words]
    environment = {**os.environ, "PYTHON": sys.executable}
    for kind, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            next(line for line in process.stdout if re.match(r"3 of \d+:", line))
            process.send_signal(kind)
            process.wait()
        assert process.returncode == code
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert runs_begun(done.stdout)[-1] == f"{12 - 6} of {12 - 6}"
    measured = [run.data.tags["claims.key"] for run in children(tmp_path / "kept") if ended(run)]
    assert len(measured) == len(set(measured)) == 12
    assert {row["runs"] for row in rows(tmp_path)} == {"3"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda:99"], "needs a CUDA GPU, and this machine has"),
        (["--device", "cuda:99"], "which here means: --device cpu --tiny"),
        (["--device", "cpu"], "GPT-2 must be trained on a GPU, and the device is cpu; add --tiny"),
        (
            [*TINY_WORDS, "--claims", "precison"],
            "no claim is called 'precison'; the claims are precision, accumulation",
        ),
        ([*TINY_WORDS, "--runs", "0"], "--runs must be 1 or more, and is 0"),
        ([*TINY_WORDS, "--minutes", "0"], "--minutes must be more than 0, and is 0"),
        ([*TINY_WORDS, "--folder", "/proc/tables"], "and /proc/tables cannot (No such file or directory)"),
        ([*TINY_WORDS, "--kept", "/proc/kept"], "name another with --folder and --kept"),
    ],
)
def test_bad_input_is_answered_before_anything_runs(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [] if "--folder" in words else ["--folder", str(tmp_path)]
    kept = [] if "--kept" in words else ["--kept", str(tmp_path / "kept")]
    assert main([*words, *places, *kept]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def runs_begun(output: str) -> list[str]:
    return re.findall(r"^\d+ of \d+(?=: )", output, re.MULTILINE)


def children(folder: Path) -> list[Run]:
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("claims tiny")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], "tags.`claims.key` != ''"))


def ended(run: Run) -> bool:
    return run.data.tags.get("outcome") in ("ok", "over_budget")


def stack(run: Run) -> bool:
    return bool(run.data.params["model"] == "encoder_stack")


def rows(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.glob("claims_cpu_*.csv")
    return list(csv.DictReader(file.read_text().splitlines()))
