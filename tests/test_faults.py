"""What a user sees when things end badly: outcomes, statuses, exit codes, and nothing lost."""

import json
import signal
import threading
from pathlib import Path

import mlflow
import psutil
import pytest
from finished import SETTINGS
from processes import interrupted, started, wait_for
from project import SMALL, Project, as_words
from test_run import training_processes

from pipeline.memory.meter import WATCHED_STEPS
from pipeline.runtime.run_folder import STEPS
from pipeline.tracking.unsent import NAME

MANY = "100000"
"""Optimizer steps that no test waits for."""
SPIKY = '''
from dataclasses import replace
from itertools import count
from typing import ClassVar

from pipeline.models.encoder_stack import EncoderStack


class Spiky(EncoderStack):
    """A stack whose loss is not a number at one optimizer step."""

    names: ClassVar[tuple[str, ...]] = ("spiky",)
    step: int
    """The step, counted from 0."""

    def build(self, name, vocabulary_size):
        built, calls = super().build(name, vocabulary_size), count()
        factor = lambda: float("nan") if next(calls) == self.step else 1.0
        return replace(built, loss=lambda *words: factor() * built.loss(*words))
'''
"""A model as a user would add one, whose training fails."""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project.copy(tmp_path)


def unsent(project: Project) -> list[Path]:
    """Return the files with what has not reached MLflow."""
    return list(project.folder.glob(f"runs/**/{NAME}"))


def is_training(project: Project) -> bool:
    """Whether some run has taken more optimizer steps than those in which memory is measured."""
    return any(file.read_bytes().count(b"\n") > WATCHED_STEPS for file in project.folder.glob(f"runs/**/{STEPS}"))


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
    done = project.here("main", {**SMALL, **settings})
    assert done.returncode == exit_code, done.stderr
    assert words in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout + done.stderr
    parent = project.parent_of("main")
    assert parent.info.status == ("FINISHED" if exit_code == 0 else "FAILED")
    [child] = project.children_of(parent).values()
    assert (child.data.tags["outcome"], child.info.status) == (outcome, status)


def test_a_loss_that_is_not_a_number_is_named_with_its_step(project: Project) -> None:
    (project.folder / "pipeline" / "models" / "spiky.py").write_text(SPIKY.replace("step: int", "step: int = 0"))
    small = {**{k: v for k, v in SMALL.items() if not k.startswith(("causal_lm", "encoder_stack"))}, "num_steps": "9"}
    spiky = {"model": "spiky", "corpus": "random_vectors", "spiky.width": "32", "spiky.num_heads": "2"}
    done = project.pipeline("main", {**small, **spiky, "spiky.step": "6"})
    assert done.returncode == 1 and "the loss of optimizer step 6 is nan" in " ".join(done.stdout.split())
    parent, child = project.only_run("main")
    assert (parent.info.status, child.info.status, child.data.tags["outcome"]) == ("FAILED", "FAILED", "diverged")
    points = mlflow.MlflowClient(project.store).get_metric_history(child.info.run_id, "step/loss")
    assert [point.step for point in points] == list(range(6))
    assert not unsent(project)


def test_a_training_killed_in_the_middle_of_a_step_keeps_the_steps_before(project: Project) -> None:
    def kill() -> None:
        wait_for(lambda: is_training(project), "the first steps")
        [training] = training_processes()
        training.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    done = project.here("main", {**SMALL, "num_steps": MANY})
    killing.join()
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "killed by SIGKILL" in " ".join(done.stdout.split())
    parent, child = project.only_run("main")
    assert (parent.info.status, child.info.status, child.data.tags["outcome"]) == ("FAILED", "FAILED", "out_of_memory")
    [result] = project.folder.glob("runs/*/*/result.json")
    points = mlflow.MlflowClient(project.store).get_metric_history(child.info.run_id, "step/loss")
    assert [point.step for point in points] == list(range(len(json.loads(result.read_text())["result"]["steps"])))
    assert not unsent(project)


@pytest.mark.slow
def test_one_failed_variant_does_not_stop_the_others(project: Project) -> None:
    file = project.folder / "experiments" / "combined.yaml"
    file.write_text(file.read_text().replace("precision: {precision: bf16}", "precision: {learning_rate: 1.0e+30}"))
    project.succeed("combined", SMALL)
    statuses = {name: run.info.status for name, run in project.children_of(project.parent_of("combined")).items()}
    assert statuses.pop("precision") == "FAILED"
    assert set(statuses.values()) == {"FINISHED"} and len(statuses) == 7


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_while_it_loads_ends_at_once(kind: signal.Signals, project: Project) -> None:
    with started(project, "python", "-m", "fitproof", "main") as process:
        wait_for(lambda: psutil.Process(process.pid).children(), "the server of processes")
        err = interrupted(process, kind)
    assert process.returncode == 130 and err.splitlines() == ["interrupted: nothing was started"], err
    assert not (project.folder / "runs").exists()


@pytest.mark.slow
def test_a_search_that_is_stopped_while_it_predicts_ends_at_once(project: Project) -> None:
    words = as_words({**SMALL, "causal_lm.num_layers": "12"})
    with started(project, "python", "-m", "fitproof", "search", *words) as process:
        wait_for(lambda: len(psutil.Process(process.pid).children(recursive=True)) >= 4, "the processes that predict")
        err = interrupted(process)
    said = ["interrupted: everything measured so far is kept; the same command goes on from there"]
    assert process.returncode == 130 and err.splitlines() in (said, ["interrupted: nothing was started"]), err
    assert not (project.folder / "runs").exists() and not (project.folder / "optuna.db").exists()


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("entry", "way"),
    [
        *((entry, "pipeline") for entry in ("profiling", "search")),
        ("accumulation", "mlflow run"),
        *(
            pytest.param(entry, way, marks=pytest.mark.slow)
            for entry, way in (
                ("main", "pipeline"),
                ("combined", "pipeline"),
                ("precision", "pipeline"),
                ("accumulation", "pipeline"),
                ("checkpointing", "pipeline"),
                ("search", "mlflow run"),
            )
        ),
    ],
)
def test_ctrl_c_marks_the_runs_killed_and_keeps_what_was_measured(entry: str, way: str, project: Project) -> None:
    settings = {**SETTINGS[entry], "num_steps": MANY}
    words = ["python", "-m", "fitproof", entry, *as_words(settings)]
    if way == "mlflow run":
        given = [word for name, value in settings.items() for word in ("-P", f"{name}={value}")]
        words = ["mlflow", "run", ".", "-e", entry, "--env-manager=local", *given]
    with started(project, *words) as process:
        wait_for(lambda: is_training(project), "the first steps")
        err = interrupted(process)
    assert process.returncode not in (0, 2)
    assert way == "mlflow run" or process.returncode == 130, err
    assert way == "mlflow run" or "interrupted: everything measured so far is kept" in err
    parent, child = project.only_run(entry)
    assert child.info.status == "KILLED"
    # `mlflow run` writes FAILED over whatever the project says of its own run when it is interrupted.
    assert parent.info.status == ("FAILED" if way == "mlflow run" else "KILLED")
    assert parent.data.tags["outcome"] == child.data.tags["outcome"] == "interrupted"
    assert child.data.metrics["data/tokens_seen"] > 0
    [result] = project.folder.glob("runs/*/*/result.json")
    assert '"interrupted"' in result.read_text()
    assert not unsent(project)
