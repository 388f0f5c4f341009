"""Every entry point as a user's command on a card: how it ends, what it leaves in MLflow, and what it refuses."""

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd
import psutil
import pytest
from cards import environment_of
from conftest import IS_SIMULATED, PNG
from finished import Done, shorten_checkpointing, shorten_finetune, shorten_levers
from mlflow import MlflowClient
from mlflow.entities import Run
from processes import started, wait_for, wait_for_the_end
from project import SMALL, Project, as_words
from test_faults import MANY, is_training, unsent

from pipeline.base.units import MIB
from pipeline.config.entry_points import TOOLS, entry_points
from pipeline.simulation.cards import CARDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_SIMULATED, reason="needs cards that this machine lacks")]

NANO = {**SMALL, "device": "auto", "model": "gpt2-nano"}
"""Settings that make any entry point short, on the first card."""
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
    "rtx4090": ("main", "checkpointing", "levers"),
    "t4": ("main", "accumulation", "combined"),
}
"""The entry points that run on each card."""
OF_ALL_CARDS = ("a100", "rtx4090")
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
MEMORY = ("memory/peak_allocated_mib", "memory/peak_reserved_mib", "memory/peak_device_mib")
PREDICTED = (
    "memory/predicted_peak_allocated_mib",
    "memory/predicted_peak_reserved_mib",
    "check/prediction_error_percent",
)


def project_on(card: str, folder: Path, num_devices: int = 1) -> Project:
    """Return a copy of the project whose commands run on a card."""
    project = Project.copy(folder)
    shorten_levers(project)
    shorten_checkpointing(project)
    shorten_finetune(project)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    project.environment.update(environment_of(card, num_devices, {**os.environ, "PATH": path}))
    return project


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


def assert_is_measured(run: Run, card: str, name: str, device: str = "cuda:0") -> None:
    """Check the outcome of a run on a card, its peaks of memory and the error of their prediction."""
    tags, metrics = run.data.tags, run.data.metrics
    assert (tags["outcome"], tags["device"], tags["device_name"]) == ("ok", device, card), name
    assert {*MEMORY, *PREDICTED} <= set(metrics), (name, tags.get("prediction"))
    allocated, reserved, on_device = (metrics[kind] for kind in MEMORY)
    assert 0 < allocated <= reserved <= on_device and metrics["memory/allocation_retries"] == 0, name
    assert abs(metrics["check/prediction_error_percent"]) < 0.2, name
    assert abs(metrics["memory/predicted_peak_reserved_mib"] - reserved) <= 2, name  # a small segment of the allocator


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
    [main] = project.children_of(project.parent_of("main")).values()
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


@pytest.fixture(scope="module")
def two_cards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Done]:
    """Give a project in which two commands have run on the second of two cards, and what each printed."""
    project = project_on("a100", tmp_path_factory.mktemp("two"), num_devices=2)
    second = {**NANO, "device": "cuda:1"}
    commands = {"profiling": ("profiling", second), "main": ("main", {**second, "budget": "22MiB"})}
    return project, dict(zip(commands, project.in_turn(commands.values()), strict=True))


def test_a_run_on_the_second_card_uses_no_memory_of_the_first(two_cards: tuple[Project, Done]) -> None:
    project, done = two_cards
    assert done["profiling"].returncode == 0, done["profiling"].stdout + done["profiling"].stderr
    parent = project.parent_of("profiling")
    [run] = project.children_of(parent).values()
    assert_is_measured(run, CARDS["a100"].name, "on the second card", "cuda:1")
    assert parent.data.tags["device"] == "cuda:1"
    [file] = project.folder.glob("runs/*-profiling-*/*/traces/memory_snapshot.pickle")
    snapshot = pickle.loads(file.read_bytes())
    on_first, on_second = snapshot["device_traces"]
    assert not on_first and on_second
    assert {segment["device"] for segment in snapshot["segments"]} == {1}


def test_a_budget_limits_the_second_card(two_cards: tuple[Project, Done]) -> None:
    project, done = two_cards
    assert done["main"].returncode == 1
    said = " ".join(done["main"].stdout.split())
    assert "GPU 1 has a total capacity of" in said and "22.00 MiB allowed" in said
    [run] = project.children_of(project.parent_of("main")).values()
    assert run.data.tags["outcome"] == "out_of_memory" and run.data.metrics["memory/peak_reserved_mib"] <= 22


@pytest.mark.slow
def test_a_search_verifies_its_answer_for_100_steps_of_the_lengths_of_the_corpus(tmp_path: Path) -> None:
    """With what the allocator holds after each step in MLflow and in the report."""
    project = project_on("a100", tmp_path)
    adapter = {"adapter": "qlora", "weights": "bfloat16", "precision": "bf16", "mathematics": "different"}
    of_chat = {"corpus": "chat", "sequences": "padded", "sequence_length": "96"}
    space = {"space": '{"micro_batch_size": [4, 8]}', "num_trials": "1", "budget": "200MiB"}
    done = project.pipeline("search", {**NANO, "effective_batch_size": "8", **adapter, **of_chat, **space})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Trained again for 100 optimizer steps in a fresh process: ok" in " ".join(done.stdout.split())
    parent = project.parent_of("search")
    runs = {name: run for name, run in project.children_of(parent).items() if ": answer: " in name}
    run = runs[max(runs, key=lambda name: runs[name].info.start_time)]  # a verification that is doubted is repeated
    held = MlflowClient(project.store).get_metric_history(run.info.run_id, "step/reserved_mib")
    assert [one.step for one in held] == [*range(100)]
    assert 0 < max(one.value for one in held) <= run.data.metrics["memory/peak_reserved_mib"] < 200
    [job] = project.folder.glob("runs/*-search-*")
    checked = json.loads((job / "findings.json").read_text())["verification"]
    assert checked["reserved_bytes"] == [2**20 * one.value for one in held]
    assert (job / "plots" / "reserved_over_time.png").read_bytes().startswith(PNG)
    assert "reserved memory over the steps of the answer" in (job / "report.html").read_text()


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


@pytest.mark.parametrize(
    ("entry", "settings", "words"),
    [
        ("main", {"budget": "4TiB"}, "a budget cannot be more than the device's memory: '4TiB' is 4096.0 GiB of"),
        ("main", {"device": "cuda:99"}, "use device=cpu or auto"),
        ("search", {"budget": "1MiB"}, "no configuration is predicted to fit the budget: the smallest predicted peak"),
    ],
)
def test_what_no_card_can_do_is_refused_before_anything_runs(
    entry: str, settings: dict[str, str], words: str, tmp_path: Path
) -> None:
    project = Project.copy(tmp_path)
    refused = project.here(entry, {**NANO, **settings})
    assert refused.returncode == 2 and words in " ".join(refused.stderr.split()), refused.stderr
    assert not (project.folder / "runs").exists() and not project.runs()


def test_a_budget_that_the_weights_exceed_ends_the_run_out_of_memory(tmp_path: Path) -> None:
    project = Project.copy(tmp_path)
    done = project.here("main", {**NANO, "budget": "1MiB"})
    assert done.returncode == 1 and "gpt2-nano: out_of_memory, OutOfMemoryError: CUDA" in " ".join(done.stdout.split())
    [run] = project.children_of(project.parent_of("main")).values()
    assert run.data.metrics["memory/peak_reserved_mib"] == 0


def test_ctrl_c_in_the_middle_of_a_run_on_a_card_keeps_what_was_measured(tmp_path: Path) -> None:
    project = project_on("rtx4090", tmp_path)
    with started(project, "python", "-m", "fitproof", "main", *as_words({**NANO, "num_steps": MANY})) as process:
        wait_for(lambda: is_training(project), "the first steps")
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted: everything measured so far is kept" in err
    wait_for_the_end(family)
    parent = project.parent_of("main")
    [child] = project.children_of(parent).values()
    assert parent.info.status == child.info.status == "KILLED"
    assert child.data.metrics["memory/peak_reserved_mib"] > 0 and child.data.metrics["data/tokens_seen"] > 0
    assert not unsent(project)
