"""A budget on a card: what does not fit is refused by the allocator, and a search stays within it, even interrupted."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mlflow.entities import Run
from optuna.trial import TrialState
from processes import interrupted, started, wait_for
from project import SMALL, Project, as_words
from test_faults import unsent
from test_search_faults import trials

from pipeline.base.units import MIB
from pipeline.config.experiment import make_experiment
from pipeline.config.given import nested
from pipeline.config.variants import read_yaml
from pipeline.memory.device import find_device, hardware_of
from pipeline.prediction.predict import predict

pytestmark = pytest.mark.gpu

LARGE = {
    **SMALL,
    "device": "auto",
    "model": "gpt2-nano",
    "sequence_length": "256",
    "causal_lm.vocabulary_size": "32768",
}
"""Settings under which logits take 32 MiB a sequence, so that the budget decides which micro-batches fit."""
RUN = {**LARGE, "micro_batch_size": "4"}
BUDGET_MIB = 300
KEPT = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
"""Whether torch keeps its cuBLAS workspaces."""
SEARCH = {**LARGE, "budget": f"{BUDGET_MIB}MiB", "effective_batch_size": "16"}
STUDY = {**SEARCH, "sampler": "tpe", "num_trials": "9", "verify_steps": "0", "study": "fitproof"}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project.copy(tmp_path)


def smallest_budget_mib() -> int:
    """Return the smallest budget in whole MiB that the run of RUN is predicted to fit."""
    experiment = make_experiment(nested({**RUN, "device": "cpu"}), "main")
    return -(-predict(experiment, hardware_of(find_device("auto"))).smallest_budget_bytes // MIB)


def test_a_run_fits_its_predicted_smallest_budget_and_no_smaller_one(project: Project) -> None:
    """A run is refused between two that fit: each has a process of its own, and the next one is clean."""
    smallest = smallest_budget_mib()
    less, more = smallest * 97 // 100, -(-smallest * 101 // 100)
    budgets = {"unlimited": "none", "refused": f"{less}MiB", "again": "none", "fitting": f"{more}MiB"}
    comparison = {"baseline": "unlimited", "variants": {name: {"budget": text} for name, text in budgets.items()}}
    own = {"question": "What does a budget refuse?", "comparisons": {"budgets": comparison}}
    (project.folder / "experiments" / "budgets.yaml").write_text(yaml.safe_dump(own, sort_keys=False))
    said = project.succeed("budgets", RUN)
    runs = project.children_of(project.parent_of("budgets"))
    assert {name: run.data.tags["outcome"] for name, run in runs.items()} == {
        "unlimited": "ok",
        "refused": "out_of_memory",
        "fitting": "ok",
        "again": "ok",
    }
    assert reserved_mib(runs["refused"]) <= less and reserved_mib(runs["fitting"]) <= more
    assert f"{less}.00 MiB allowed" in said
    for kind in ("memory/peak_allocated_mib", "memory/peak_reserved_mib"):
        assert runs["again"].data.metrics[kind] == runs["unlimited"].data.metrics[kind]
    assert (runs["refused"].info.status, runs["again"].info.status) == ("FAILED", "FINISHED")


def reserved_mib(run: Run) -> float:
    peak: float = run.data.metrics["memory/peak_reserved_mib"]
    return peak


def test_the_trials_of_a_search_never_exceed_its_budget(project: Project) -> None:
    """Two thirds of the configurations do not fit; a few less with torch 2.15, which keeps no cuBLAS workspaces."""
    project.succeed("search", {**SEARCH, "num_trials": "4"})
    parent = project.parent_of("search")
    runs = project.children_of(parent)
    assert len(runs) >= 5 and {run.data.tags["outcome"] for run in runs.values()} == {"ok"}
    assert all(reserved_mib(run) <= BUDGET_MIB for run in runs.values())
    [job] = project.folder.glob("runs/*-search-*")
    found = json.loads((job / "findings.json").read_text())
    reasons = [one["reason"] for one in found["certificate"]["unmeasured"]]
    assert found["num_configurations"] == 30 and reasons.count("does not fit") >= (20 if KEPT else 18)
    assert found["verification"]["answer"]["outcome"] == "ok"
    assert all(one["metrics"]["peak_reserved_mib"] <= BUDGET_MIB for one in found["verification"]["runs"])
    assert (job / "report.html").exists() and (job / "handover" / "train.py").exists()
    best = read_yaml(project.folder / "best.yaml")
    assert parent.data.metrics["memory/peak_reserved_mib"] <= BUDGET_MIB and best["budget"] == SEARCH["budget"]
    project.succeed("main", {"config": "best.yaml"})


@pytest.mark.slow
def test_a_search_that_is_interrupted_and_killed_resumes(project: Project) -> None:
    """TPE does not predict memory, so some of its trials are refused."""
    words = ["python", "-m", "fitproof", "search", *as_words(STUDY)]
    for num_ended, kind in ((2, signal.SIGINT), (4, signal.SIGKILL)):
        with started(project, *words) as process:
            wait_for(lambda num=num_ended: len(ended(project)) >= num, f"{num_ended} trials")
            err = interrupted(process, kind)
        assert process.returncode == (130 if kind is signal.SIGINT else -signal.SIGKILL), err
        assert "Traceback" not in err
    before = [(trial.params, trial.state) for trial in ended(project)]
    project.succeed("search", STUDY)
    after = ended(project)
    assert [(trial.params, trial.state) for trial in after[: len(before)]] == before and len(after) == 9
    assert len({tuple(trial.params.items()) for trial in after}) == 9
    assert {trial.state for trial in after} == {TrialState.COMPLETE, TrialState.PRUNED}
    assert_what_was_refused_did_not_fit(project)
    assert {run.info.status for run in project.runs()} <= {"FINISHED", "FAILED", "KILLED"}
    assert project.here("sync", {}).returncode == 0 and not unsent(project)


def ended(project: Project) -> list[Any]:
    """Return the trials that fitted or were refused."""
    return [trial for trial in trials(project) if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]


def assert_what_was_refused_did_not_fit(project: Project) -> None:
    """Check that no trial reserved more than the budget, and that all those that were refused are out of memory."""
    for trial in ended(project):
        assert trial.user_attrs["metrics"]["peak_reserved_mib"] <= BUDGET_MIB
        is_refused = trial.state is TrialState.PRUNED
        assert trial.user_attrs["outcome"] == ("out_of_memory" if is_refused else "ok")
    others = [trial for trial in trials(project) if trial not in ended(project)]
    outcomes = {t.user_attrs.get("outcome", "killed") for t in others}  # a killed worker stores none
    assert {t.state for t in others} == {TrialState.FAIL} and outcomes <= {"interrupted", "killed"}
