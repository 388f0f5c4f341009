"""A card's limits for a user's command: a second card, a budget, what is refused, an interruption."""

import json
import pickle
from pathlib import Path

import pytest
from card_projects import NANO, assert_is_measured, project_on
from conftest import IS_SIMULATED, PNG
from finished import Done
from mlflow import MlflowClient
from processes import interrupted, started, wait_for
from project import Project, as_words
from test_faults import MANY, is_training, unsent

from pipeline.simulation.cards import CARDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_SIMULATED, reason="needs cards that this machine lacks")]


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
    parent, run = project.only_run("profiling")
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
    _, run = project.only_run("main")
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
    _, run = project.only_run("main")
    assert run.data.metrics["memory/peak_reserved_mib"] == 0


def test_ctrl_c_in_the_middle_of_a_run_on_a_card_keeps_what_was_measured(tmp_path: Path) -> None:
    project = project_on("rtx4090", tmp_path)
    with started(project, "python", "-m", "fitproof", "main", *as_words({**NANO, "num_steps": MANY})) as process:
        wait_for(lambda: is_training(project), "the first steps")
        err = interrupted(process)
    assert process.returncode == 130 and "interrupted: everything measured so far is kept" in err
    parent, child = project.only_run("main")
    assert parent.info.status == child.info.status == "KILLED"
    assert child.data.metrics["memory/peak_reserved_mib"] > 0 and child.data.metrics["data/tokens_seen"] > 0
    assert not unsent(project)
