"""What a user sees when things end badly: outcomes, statuses, exit codes, and nothing lost."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from optuna.trial import TrialState
from project import SMALL, Project, as_words

SEARCH = {**SMALL, "effective_batch_size": "8", "budget": "64MiB", "num_trials": "6"}
LONG = {**SMALL, "num_steps": "100000"}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project.copy(tmp_path)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def steps_on(project: Project, store: str | None = None) -> bool:
    """Whether some run has logged a loss."""
    return any("loss" in run.data.metrics for run in project.runs(store))


@contextmanager
def started(project: Project, *words: str, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Give a command that is running, in a process group of its own, and end it whatever happens."""
    with project.popen(*words, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("settings", "outcome", "status", "exit_code", "words"),
    [
        ({"budget": "1MiB"}, "over_budget", "FINISHED", 0, "is over the budget of 1.0 MiB"),
        ({"causal_lm.vocabulary_size": str(2**37)}, "out_of_memory", "FAILED", 1, "out_of_memory, RuntimeError"),
        ({"learning_rate": "1e30"}, "diverged", "FAILED", 1, "the loss of optimizer step 1 is nan"),
        (
            {"num_steps": "100000", "time_limit": "2"},
            "timed_out",
            "FAILED",
            1,
            "ended after its time_limit of 2 seconds",
        ),
    ],
)
def test_an_outcome_is_a_row_and_a_status(
    settings: dict[str, str], outcome: str, status: str, exit_code: int, words: str, project: Project
) -> None:
    done = project.pipeline("main", {**SMALL, **settings})
    assert done.returncode == exit_code, done.stderr
    assert words in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout + done.stderr
    parent = project.parent_of("main")
    assert parent.info.status == ("FINISHED" if exit_code == 0 else "FAILED")
    [child] = project.children_of(parent).values()
    assert (child.data.tags["outcome"], child.info.status) == (outcome, status)


def test_one_failed_variant_does_not_stop_the_others(project: Project) -> None:
    file = project.folder / "experiments" / "combined.yaml"
    file.write_text(file.read_text().replace("precision: {precision: bf16}", "precision: {learning_rate: 1.0e+30}"))
    done = project.pipeline("combined", SMALL)
    assert done.returncode == 0, done.stderr
    statuses = {name: run.info.status for name, run in project.children_of(project.parent_of("combined")).items()}
    assert statuses.pop("precision") == "FAILED"
    assert set(statuses.values()) == {"FINISHED"} and len(statuses) == 7


@pytest.mark.parametrize("way", ["pipeline", "mlflow run"])
@pytest.mark.parametrize("entry", ["accumulation", "search"])
def test_ctrl_c_marks_the_runs_killed_and_keeps_what_was_measured(entry: str, way: str, project: Project) -> None:
    settings = {**(SEARCH if entry == "search" else {}), **LONG}
    words = ["python", "-m", "pipeline", entry, *as_words(settings)]
    if way == "mlflow run":
        given = [word for name, value in settings.items() for word in ("-P", f"{name}={value}")]
        words = ["mlflow", "run", ".", "-e", entry, "--env-manager=local", *given]
    with started(project, *words) as process:
        wait_for(lambda: steps_on(project), "the first steps")
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode not in (0, 2)
    assert way == "mlflow run" or process.returncode == 130, err
    assert way == "mlflow run" or "interrupted: what was measured is kept" in err
    wait_for(lambda: not any(p.is_running() and p.status() != "zombie" for p in family), "the end of its processes")
    parent = project.parent_of(entry)
    [child] = project.children_of(parent).values()
    assert child.info.status == "KILLED"
    # `mlflow run` writes FAILED over whatever the project says of its own run when it is interrupted.
    assert parent.info.status == ("FAILED" if way == "mlflow run" else "KILLED")
    assert parent.data.tags["outcome"] == child.data.tags["outcome"] == "interrupted"
    assert child.data.metrics["tokens_seen"] > 0
    [result] = project.folder.glob("runs/*/*/result.json")
    assert '"interrupted"' in result.read_text()


def test_a_search_killed_by_sigkill_resumes(project: Project) -> None:
    storage = f"sqlite:///{project.folder}/optuna.db"

    def finished() -> list[optuna.trial.FrozenTrial]:
        if not (project.folder / "optuna.db").exists():
            return []
        try:
            study = optuna.load_study(storage=storage, study_name="headroom")
        except KeyError:
            return []
        return [trial for trial in study.trials if trial.state is TrialState.COMPLETE]

    # Long enough trials that the kill hits one in the middle.
    settings = {**SEARCH, "num_steps": "60"}
    with started(project, "python", "-m", "pipeline", "search", *as_words(settings)) as process:
        wait_for(lambda: len(finished()) >= 2, "two trials")
        process.kill()
    before = finished()
    again = project.pipeline("search", settings)
    assert again.returncode == 0, again.stderr
    after = optuna.load_study(storage=storage, study_name="headroom").trials
    complete = [trial for trial in after if trial.state is TrialState.COMPLETE]
    assert [t.params for t in complete[: len(before)]] == [t.params for t in before]
    assert len(complete) == 6
    assert len({tuple(trial.params.items()) for trial in complete}) == 6
    assert len(after) - len(complete) <= 1
    assert not [trial for trial in after if trial.state is TrialState.RUNNING]

    for name, value in {"budget": "60MiB", "effective_batch_size": "4", "seed": "1", "causal_lm.width": "64"}.items():
        refused = project.pipeline("search", {**settings, name: value})
        assert refused.returncode == 2
        assert f"{name} is {value}, and was" in refused.stderr.replace("'", "")
    done = project.pipeline("search", settings)
    assert done.returncode == 0 and "trial 7" not in done.stdout
    assert len(optuna.load_study(storage=storage, study_name="headroom").trials) == len(after)


def test_nothing_fits_is_an_answer(project: Project) -> None:
    done = project.pipeline("search", {**SEARCH, "budget": "1MiB", "num_trials": "3"})
    assert done.returncode == 1
    out = " ".join(done.stdout.split())
    assert "Nothing fits 1.0 MiB at an effective batch of 8: the smallest peak seen is" in out
    assert not (project.folder / "best.yaml").exists()
    assert project.parent_of("search").info.status == "FAILED"


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def server(project: Project) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run a tracking server of the project's own; give its address and its process."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    words = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started(project, *words, "--backend-store-uri", "sqlite:///server.db", **quiet) as process:
        wait_for(answers, "the tracking server")
        yield address, process


def test_a_tracking_server_takes_the_runs_and_may_go_away(
    project: Project, server: tuple[str, "subprocess.Popen[str]"]
) -> None:
    address, process = server
    project.environment["MLFLOW_TRACKING_URI"] = address
    done = project.pipeline("main", SMALL)
    assert done.returncode == 0, done.stderr
    parent = project.parent_of("main", address)
    [child] = project.children_of(parent, address).values()
    assert (parent.info.status, child.info.status, child.data.tags["outcome"]) == ("FINISHED", "FINISHED", "ok")
    assert child.data.metrics["final_loss"] > 0

    project.environment["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    words = ["python", "-m", "pipeline", "main", *as_words({**SMALL, "num_steps": "3000"})]
    with started(project, *words) as training:
        wait_for(lambda: sum("loss" in run.data.metrics for run in project.runs(address)) == 2, "the second run")
        os.killpg(process.pid, signal.SIGKILL)
        out, err = training.communicate(timeout=300)
    assert training.returncode == 0, err
    assert "going on, results are on disk" in err
    assert err.count("MLflow did not take") == 1
    results = sorted(project.folder.glob("runs/*-main-*/*/result.json"))
    assert len(results) == 2
    assert results[-1].read_text().count('"learning_rate"') >= 3000
    assert "peak MiB" in out
