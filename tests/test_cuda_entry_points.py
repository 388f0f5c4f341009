"""Every entry point as a user's command on a card: how it ends, what it leaves in MLflow, and what it refuses."""

import json
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from card_projects import NANO, assert_is_measured, project_on
from conftest import IS_SIMULATED, PNG
from finished import Done
from project import Project
from test_faults import unsent

from pipeline.base.units import MIB
from pipeline.config.entry_points import TOOLS, entry_points
from pipeline.simulation.cards import CARDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_SIMULATED, reason="needs cards that this machine lacks")]

ONCE = {**NANO, "repeats": "0"}
"""Settings of entry points whose variants are not run again, as those of `precision` are."""
SETTINGS = {
    "accumulation": ONCE,
    "checkpointing": {name: value for name, value in ONCE.items() if name != "causal_lm.num_layers"},
    "combined": ONCE,
    "levers": ONCE,
    "search": {**NANO, "effective_batch_size": "8", "num_trials": "3", "budget": "90MiB"},
    "plan": {**NANO, "effective_batch_size": "8"},
    "finetune": {**NANO, "effective_batch_size": "8", "num_trials": "2", "budget": "90MiB", "verify_steps": "0"},
}
"""How an entry point is run, where other than with NANO."""
RUNS = {
    "h200": ("main", "search", "plan", "profiling"),
    "a100": ("main", "precision", "finetune"),
    "rtx4090": ("main", "accumulation", "checkpointing", "levers"),
    "t4": ("main", "combined"),
}
"""The entry points that run on each card."""
OF_ALL_CARDS = ("a100", "rtx4090", "t4")
"""Cards whose entry points only `make test-all` runs."""
THIS = "h200"
"""The card that the tests themselves run as."""
TWO_FORMATS = {"num_trials": "2", "verify_steps": "0", "space": '{"precision": ["fp32", "bf16"]}'}
WITHOUT_BF16 = {
    "main in bf16": ("main", {**NANO, "precision": "bf16"}),
    "search with bf16": ("search", {**SETTINGS["search"], **TWO_FORMATS}),
}
"""Commands with a format that the T4, which also runs them, does not support."""
ENTRIES_OF_CARDS = [
    pytest.param(card, entry, marks=[pytest.mark.slow] if card in OF_ALL_CARDS else [])
    for card, entries in RUNS.items()
    for entry in entries
]
FinishedOn = Callable[[str], tuple[Project, Done]]


@pytest.fixture(scope="module")
def finished_on(tmp_path_factory: pytest.TempPathFactory) -> FinishedOn:
    """Give a function that returns a project in which a card's entry points have run, and what each printed.

    The commands of a card run in one process, which loads once what takes each of them seconds.
    """

    @cache
    def finish(card: str) -> tuple[Project, Done]:
        project = project_on(card, tmp_path_factory.mktemp(card))
        commands = {entry: (entry, SETTINGS.get(entry, NANO)) for entry in RUNS[card]}
        if card == THIS:
            return project, {name: project.here(*command) for name, command in commands.items()}
        if card == "t4":
            commands |= WITHOUT_BF16
        return project, dict(zip(commands, project.in_turn(commands.values()), strict=True))

    return finish


def test_every_entry_point_runs_on_a_card() -> None:
    assert set(RUNS) <= set(CARDS) and {entry for entries in RUNS.values() for entry in entries} == set(entry_points())


@pytest.mark.parametrize(("card", "entry"), ENTRIES_OF_CARDS)
def test_it_ends_well_and_nothing_is_left_unfinished(card: str, entry: str, finished_on: FinishedOn) -> None:
    project, done = finished_on(card)
    assert done[entry].returncode == 0, done[entry].stdout + done[entry].stderr
    assert "Traceback" not in done[entry].stderr and "results: " in done[entry].stdout
    assert project.parent_of(entry).info.status == "FINISHED"
    assert [(run.info.run_name, run.info.status) for run in project.runs() if run.info.status != "FINISHED"] == []
    assert not unsent(project)
    [job] = project.folder.glob(f"runs/*-{entry}-*")
    assert (job / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(("card", "entry"), [one for one in ENTRIES_OF_CARDS if "plan" not in one.values])
def test_each_run_has_all_kinds_of_memory_and_its_prediction(card: str, entry: str, finished_on: FinishedOn) -> None:
    project, _ = finished_on(card)
    children = project.children_of(project.parent_of(entry))
    assert children
    for name, run in children.items():
        assert_is_measured(run, CARDS[card].name, name)


@pytest.mark.slow
def test_a_format_that_a_card_does_not_support_is_skipped_with_the_reason(finished_on: FinishedOn) -> None:
    project, done = finished_on("t4")
    said = " ".join(done["combined"].stdout.split())
    assert "precision: skipped, bf16 needs compute capability 8.0 (Ampere) or newer, and Tesla T4 is older" in said
    ran = project.children_of(project.parent_of("combined"))
    assert {*ran} == {"fp32", "accumulation", "checkpointing", "accumulation + checkpointing"}


@pytest.mark.slow
def test_all_four_formats_run_on_an_ampere_card(finished_on: FinishedOn) -> None:
    project, _ = finished_on("a100")
    assert {*project.children_of(project.parent_of("precision"))} == {"fp32", "tf32", "fp16", "bf16"}


def test_the_tools_read_what_ran_on_a_card(finished_on: FinishedOn) -> None:
    project, _ = finished_on("h200")
    [job] = project.folder.glob("runs/*-main-*")
    ids = ",".join(run.info.run_id for run in project.children_of(project.parent_of("search")).values())
    (job / "report.html").unlink()
    given: dict[str, dict[str, str]] = {
        "report": {"folder": str(job)},
        "compare": {"runs": ids},
        "export": {"config": "best.yaml"},
        "sync": {},
    }
    assert {*given, "check", "explain", "simulate", "worker"} == set(TOOLS)
    for tool, settings in given.items():
        done = project.here(tool, settings)
        assert done.returncode == 0, (tool, done.stdout, done.stderr)
    assert (job / "report.html").exists()


def test_a_plan_for_the_card_of_this_machine_says_what_its_runs_need(finished_on: FinishedOn) -> None:
    project, _ = finished_on("h200")
    [file] = project.folder.glob("runs/*-plan-*/plan*.csv")
    planned = pd.read_csv(file).set_index(["micro-batch", "checkpointing", "precision"])
    _, main = project.only_run("main")
    row, metrics = planned.loc[(8, "none", "fp32")], main.data.metrics
    assert row["reserved MiB"] == metrics["memory/peak_reserved_mib"]
    assert row["device MiB"] == metrics["memory/peak_device_mib"]
    assert row["allocated MiB"] == metrics["memory/predicted_peak_allocated_mib"]


def test_a_profile_has_the_snapshot_and_the_timeline_of_its_memory(finished_on: FinishedOn) -> None:
    project, _ = finished_on(THIS)
    [job] = project.folder.glob("runs/*-profiling-*")
    [traces] = job.glob("*/traces")
    assert (traces / "trace.json.gz").stat().st_size > 1000
    assert "<script" in (traces / "memory_trace.html").read_text()
    plots = {plot.stem: plot.read_bytes() for plot in job.glob("plots/*.png")}
    assert {*plots} == {"memory", "modules", "phases", "time"} and all(plot.startswith(PNG) for plot in plots.values())
    findings = json.loads((job / "findings.json").read_text())
    peak_mib = findings["row"]["metrics"]["peak_allocated_mib"]
    assert largest_held(traces / "memory_snapshot.pickle") / MIB == pytest.approx(peak_mib, rel=0.02)
    course = findings["memory"]["course"]
    assert course is not None and [phase for phase, _ in course["phases"]] == ["forward", "backward", "optimizer"]


def largest_held(snapshot_file: Path) -> int:
    """Return the most bytes that tensors held in the recorded step, from the end back; torch does not round events."""
    snapshot = pickle.loads(snapshot_file.read_bytes())
    [events] = snapshot["device_traces"]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    held = [sum(block["size"] for block in blocks if block["state"] == "active_allocated")]
    for event in reversed(events):
        sign = {"alloc": -1, "free_requested": 1}.get(event["action"], 0)
        held.append(held[-1] + sign * event["size"])
    return max(held)


@pytest.mark.slow
def test_a_value_that_a_card_does_not_support_is_refused_or_leaves_the_space(finished_on: FinishedOn) -> None:
    project, done = finished_on("t4")
    refused, searched = (done[name] for name in WITHOUT_BF16)
    assert refused.returncode == 2
    reason = "bf16 needs compute capability 8.0 (Ampere) or newer, and Tesla T4 is older; set precision=fp16"
    assert refused.stderr.splitlines()[-1] == f"error: {reason}"
    assert searched.returncode == 0, searched.stdout + searched.stderr
    assert f"left out of the space: 1 configuration: {reason}" in " ".join(searched.stdout.split())
    children = project.children_of(project.parent_of("search"))
    assert {run.data.params["precision"] for run in children.values()} == {"fp32"}
