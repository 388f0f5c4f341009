"""A search that is killed, has its storage locked, or runs twice at once: no trial is lost or wasted."""

import json
import sqlite3
import time
from collections import Counter
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import mlflow
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from processes import started, wait_for
from project import SMALL, Project, as_words, parent_id
from sqlalchemy.exc import SQLAlchemyError
from test_faults import unsent

SEARCH = {
    **SMALL,
    "effective_batch_size": "8",
    "budget": "64MiB",
    "num_trials": "6",
    "sampler": "tpe",
    "verify_steps": "0",
    "worker_timeout": "6",
    "study": "fitproof",
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project.copy(tmp_path)


def trials(project: Project) -> list[FrozenTrial]:
    """Return every trial of the study, none where there is no study yet."""
    if not (project.folder / "optuna.db").exists():
        return []
    try:
        return optuna.load_study(storage=f"sqlite:///{project.folder}/optuna.db", study_name="fitproof").trials
    except (KeyError, SQLAlchemyError):  # not there yet, or being made at this moment
        return []


def complete(project: Project) -> list[FrozenTrial]:
    return [trial for trial in trials(project) if trial.state is TrialState.COMPLETE]


def num_complete(project: Project) -> int:
    """Return the number of measured trials, in a hundredth of the time that Optuna takes to read them."""
    try:
        with closing(sqlite3.connect(f"file:{project.folder}/optuna.db?mode=ro", uri=True)) as study:
            [(number,)] = study.execute("SELECT count(*) FROM trials WHERE state = 'COMPLETE'")
    except sqlite3.OperationalError:  # not there yet, or being made at this moment
        return 0
    return int(number)


def configurations(project: Project) -> "Counter[tuple[tuple[str, object], ...]]":
    """Return how often each configuration was measured: twice if its time was an outlier."""
    return Counter(tuple(trial.params.items()) for trial in complete(project))


def assert_only_what_was_doubted_is_measured_again(project: Project) -> None:
    """Check that each further trial of a configuration was to repeat it after the one before, and none is unfinished.

    How often one is repeated follows from how much times vary on this machine.
    """
    counts = configurations(project)
    completed = [run for run in project.runs() if run.data.tags.get("outcome") == "ok"]
    again = [run for run in completed if "(measured again)" in str(run.info.run_name)]
    assert counts.total() - len(counts) == len(again)
    ends: dict[tuple[Any, ...], datetime] = {}
    for trial in sorted(complete(project), key=lambda trial: trial.datetime_start):
        choice = tuple(trial.params.items())
        assert choice not in ends or ends[choice] <= trial.datetime_start, f"two searches measure {choice} at once"
        ends[choice] = trial.datetime_complete
    assert_nothing_is_unfinished(project)


def assert_nothing_is_unfinished(project: Project) -> None:
    """Check that every trial was measured, or is known to have been interrupted."""
    others = [trial for trial in trials(project) if trial.state is not TrialState.COMPLETE]
    assert all(
        (t.state, t.user_attrs.get("outcome", "interrupted")) == (TrialState.FAIL, "interrupted") for t in others
    )


def assert_each_configuration_once(project: Project, num_trials: int) -> None:
    """Check that the study has this many measured configurations, and nothing unfinished."""
    assert len(complete(project)) == num_trials
    assert len({tuple(trial.params.items()) for trial in complete(project)}) == num_trials
    assert_nothing_is_unfinished(project)


def test_a_search_killed_by_sigkill_resumes(project: Project) -> None:
    # Long enough trials that the kill hits one in the middle.
    settings = {**SEARCH, "num_steps": "60"}
    with started(project, "python", "-m", "fitproof", "search", *as_words(settings)) as process:
        wait_for(lambda: num_complete(project) >= 2, "two trials")
        process.kill()
    before = complete(project)
    project.succeed("search", settings)
    after = trials(project)
    assert [t.params for t in complete(project)[: len(before)]] == [t.params for t in before]
    assert_each_configuration_once(project, 6)
    assert len(after) - 6 <= 1

    # What the killed process had begun has been marked by the next start; what it had not sent, sync sends.
    assert {run.info.status for run in project.runs()} <= {"FINISHED", "KILLED"}
    *_, killed = (run for run in project.runs() if run.data.tags.get("technique") == "search" and not parent_id(run))
    assert (killed.info.status, killed.data.tags["outcome"]) == ("KILLED", "interrupted")
    project.succeed("sync", {})
    assert not unsent(project)
    outcomes = sorted(run.data.tags["outcome"] for run in project.runs() if parent_id(run))
    assert outcomes.count("ok") == 6 and set(outcomes) <= {"ok", "interrupted"} and len(outcomes) <= 7
    for name, run in project.children_of(killed).items():
        points = mlflow.MlflowClient(project.store).get_metric_history(run.info.run_id, "step/loss")
        assert [point.step for point in points] == list(range(len(points))), name

    for name, value in {"budget": "60MiB", "effective_batch_size": "4", "seed": "1", "causal_lm.width": "64"}.items():
        refused = project.here("search", {**settings, name: value})
        assert refused.returncode == 2
        assert f"{name} is {value}, and was" in refused.stderr.replace("'", "")
    done = project.here("search", settings)
    assert done.returncode == 0 and "trial 7:" not in done.stdout  # no progress line: nothing was measured
    assert len(trials(project)) == len(after)


def test_nothing_fits_is_an_answer(project: Project) -> None:
    done = project.here("search", {**SEARCH, "budget": "1MiB", "num_trials": "3"})
    assert done.returncode == 1
    out = " ".join(done.stdout.split())
    assert "Nothing fits 1.0 MiB at an effective batch of 8: the smallest measured peak is" in out
    assert not (project.folder / "best.yaml").exists()
    assert project.parent_of("search").info.status == "FAILED"


@pytest.mark.slow
def test_two_searches_of_one_study_share_its_trials(project: Project) -> None:
    words = ["python", "-m", "fitproof", "search", *as_words(SEARCH)]
    two = [project.popen(*words) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in two]
    assert [process.returncode for process in two] == [0, 0], said
    assert all("(6 of " in " ".join(out.split()) for out, _ in said)
    assert_each_configuration_once(project, 6)
    children = [run for run in project.runs() if parent_id(run)]
    assert [run.data.tags["outcome"] for run in children] == ["ok"] * 6
    assert {run.info.status for run in project.runs()} == {"FINISHED"}
    assert not unsent(project)


@pytest.mark.slow
def test_two_predictive_searches_share_a_study(project: Project) -> None:
    settings = {**SEARCH, "sampler": "predictive", "num_trials": "24"}
    words = ["python", "-m", "fitproof", "search", *as_words(settings)]
    two = [project.popen(*words) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in two]
    assert [process.returncode for process in two] == [0, 0], said
    assert all("of 24 configurations" in " ".join(out.split()) for out, _ in said)
    assert len(complete(project)) >= 4
    assert_only_what_was_doubted_is_measured_again(project)


@pytest.mark.slow
def test_a_predictive_search_that_is_killed_goes_on_where_it_was(project: Project) -> None:
    settings = {**SEARCH, "sampler": "predictive", "num_trials": "24", "verify_steps": "4"}
    with started(project, "python", "-m", "fitproof", "search", *as_words(settings)) as process:
        wait_for(lambda: num_complete(project) >= 2, "two trials")
        process.kill()
    before = [trial.params for trial in complete(project)]
    project.succeed("search", settings)
    assert [trial.params for trial in complete(project)][: len(before)] == before
    assert_only_what_was_doubted_is_measured_again(project)
    job = max((project.folder / "runs").glob("*-search-*"))
    found = json.loads((job / "findings.json").read_text())
    assert found["certificate"]["num_measured"] == len(configurations(project))
    assert found["verification"]["answer"]["outcome"] == "ok"
    certificate = found["certificate"]  # steps this short are noisy: after the second measurement more may be open
    assert not certificate["is_adequate"] or 0 <= certificate["remaining_improvement"] <= certificate["bound"] < 1
    assert found["verification"]["max_loss_difference"] <= found["verification"]["tolerance"]
    assert {row["number"] for row in found["rows"]} >= {trial.number for trial in complete(project)}
    assert (job / "handover" / "train.py").exists()
    assert (job / "never_run.csv").exists() == (len(configurations(project)) < 24)


def test_a_budget_that_nothing_is_predicted_to_fit_is_refused_before_anything_is_stored(project: Project) -> None:
    refused = project.here("search", {**SEARCH, "sampler": "predictive", "budget": "0.2MiB"})
    assert refused.returncode == 2
    said = " ".join(refused.stderr.split())
    assert "no configuration is predicted to fit the budget: the smallest predicted peak is" in said
    assert "would help most" in said
    assert not (project.folder / "optuna.db").exists() and not project.runs()
    tight = {**SEARCH, "sampler": "predictive", "search_time_limit": "0.01", "num_trials": "24"}
    hurried = project.here("search", tight)
    assert hurried.returncode == 0 and len(complete(project)) == 1
    joined = project.here("worker", {"study": "fitproof", "workers": "1"})
    assert joined.returncode == 0 and len(complete(project)) == 1, "its time is over for all workers"


@pytest.mark.slow
def test_a_storage_that_another_process_locks_is_waited_for(project: Project) -> None:
    settings = {**SEARCH, "num_trials": "4"}
    with started(project, "python", "-m", "fitproof", "search", *as_words(settings)) as process:
        wait_for(lambda: num_complete(project) >= 1, "a trial")
        with closing(sqlite3.connect(project.folder / "optuna.db", timeout=60, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            time.sleep(7)  # longer than the 5 seconds that Python's sqlite3 waits by default
            other.execute("ROLLBACK")
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in err, err
    assert_each_configuration_once(project, 4)
