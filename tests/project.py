"""A copy of the project in a folder of its own, and the commands that a user would run there."""

import contextlib
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import mlflow
import pytest
import yaml
from conftest import ROOT, THREE_LEVERS
from mlflow.entities import Run
from mlflow.exceptions import ExecutionException

from pipeline.cli import main

SMALL = {
    "num_steps": "4",
    "sequence_length": "32",
    "vocabulary_size": "512",
    "causal_lm.num_layers": "2",
    "causal_lm.width": "32",
    "causal_lm.num_heads": "2",
    "encoder_stack.width": "32",
    "encoder_stack.num_heads": "2",
    "random_vectors.num_sequences": "32",
    "device": "cpu",
}
"""Settings that make any entry point short."""
NOT_COPIED = ("benchmarks/", "docs/images/", "tests/")
"""Folders that no command reads."""
NO_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""Keeps MLflow's server from starting eight processes more, for evaluations that these tests do not ask for."""
IN_TURN = """
import json, pickle, sys
from pathlib import Path
sys.path.append(sys.argv[3])
from project import Project
done = [Project(Path.cwd()).here(*command) for command in json.loads(sys.argv[1])]
Path(sys.argv[2]).write_bytes(pickle.dumps(done))
"""
"""Runs commands in its process, in the folder of a project, and writes what each printed into a file."""


@dataclass
class Project:
    """The folder, and the environment in which its commands run."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def copy(cls, folder: Path, with_store: bool = True) -> "Project":
        """Copy what git tracks or would and commands read, and an empty tracking store, which takes seconds to make.

        A search or a plan has few configurations there, unless it is given a space.
        """
        listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for name in (name for name in names if not name.startswith(NOT_COPIED)):
            for file in (name, cache_from_source(name)):  # a process that finds no compiled module compiles for seconds
                if (ROOT / file).exists():
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / file, folder / file)
        for entry in ("search", "plan"):
            file = folder / "experiments" / f"{entry}.yaml"
            values = {**yaml.safe_load(file.read_text()), "space": THREE_LEVERS}
            file.write_text(yaml.safe_dump(values, sort_keys=False))
        project = cls(folder)
        if with_store:
            new_store(folder)
        return project

    @property
    def store(self) -> str:
        """The tracking store of its runs, the same that MLflow finds by default."""
        return f"sqlite:///{self.folder}/mlflow.db"

    def popen(self, *words: str, **options: Any) -> "subprocess.Popen[str]":
        """Start a command as a user of the project's virtual environment would."""
        binaries = Path(sys.executable).parent
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
        own = {"PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": "", **NO_JOBS}
        environment = {**inherited, **own, **self.environment}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(words, cwd=self.folder, env=environment, **{**pipes, **options})

    def call(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end."""
        process = self.popen(*words)
        out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def mlflow_run(self, entry: str, settings: Mapping[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
        """Run an entry point through MLflow, with these settings."""
        parameters = [word for name, value in settings.items() for word in ("-P", f"{name}={value}")]
        return self.call("mlflow", "run", ".", "-e", entry, "--env-manager=local", *parameters, *words)

    def pipeline(self, entry: str, settings: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
        """Run an entry point without `mlflow run`."""
        return self.call("python", "-m", "fitproof", entry, *as_words(settings))

    def here(self, entry: str, settings: Mapping[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
        """Run an entry point of this project in this process, which has loaded already what takes a new one seconds."""
        command = [entry, *as_words(settings), *words]
        with self._inside() as (out, err):
            return subprocess.CompletedProcess(command, main(command), _text(out), _text(err))

    def succeed(self, entry: str, settings: Mapping[str, str], *words: str) -> str:
        """Run an entry point as here(), which must end well; return what it prints, with single spaces."""
        done = self.here(entry, settings, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return " ".join(done.stdout.split())

    def in_turn(self, commands: Collection[tuple[str, Mapping[str, str]]]) -> "list[subprocess.CompletedProcess[str]]":
        """Run entry points with their settings one after another, all in one process of their own."""
        with tempfile.NamedTemporaryFile() as file:
            done = self.call("python", "-c", IN_TURN, json.dumps([*commands]), file.name, str(Path(__file__).parent))
            assert done.returncode == 0, done.stderr
            results: list[subprocess.CompletedProcess[str]] = pickle.loads(file.read())
            return results

    def mlflow_run_here(self, entry: str, settings: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
        """Let MLflow run an entry point in this process: the run and the command are those of `mlflow run`."""
        done: list[subprocess.CompletedProcess[str]] = []

        def run_command(command: str, folder: str, experiment_id: str, run_id: str) -> Mock:
            words = shlex.split(command)
            assert words[:3] == ["python", "-m", "fitproof"]
            variables = mlflow.projects.utils.get_run_env_vars(run_id, experiment_id)
            with Project(Path(folder), {**self.environment, **variables})._inside() as (out, err):
                done.append(subprocess.CompletedProcess(words, main(words[3:]), _text(out), _text(err)))
            return Mock(run_id=run_id, wait=lambda: done[0].returncode == 0)

        with self._inside(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("mlflow.projects.backend.local._run_entry_point", run_command)
            with contextlib.suppress(ExecutionException):  # the command's exit code was not 0
                mlflow.projects.run(".", entry, parameters=dict(settings), env_manager="local")
        [only] = done
        return only

    @contextlib.contextmanager
    def _inside(self) -> Iterator[tuple[IO[str], IO[str]]]:
        """Be in its folder, with its environment; give the files of what is written to stdout and to stderr."""
        with (
            contextlib.chdir(self.folder),
            _redirected(1, contextlib.redirect_stdout) as out,
            _redirected(2, contextlib.redirect_stderr) as err,
            pytest.MonkeyPatch.context() as patch,
        ):
            for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
                patch.delenv(name)
            for name, value in {"MLFLOW_TRACKING_URI": self.store, **self.environment}.items():
                patch.setenv(name, value)
            yield out, err

    def runs(self, store: str | None = None) -> list[Run]:
        """Return every run of its tracking store, the newest first."""
        client = mlflow.MlflowClient(store or self.store)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        return list(client.search_runs(experiments, max_results=1000))

    def parent_of(self, entry: str, store: str | None = None) -> Run:
        """Return the newest parent run of an entry point."""
        return next(run for run in self.runs(store) if run.data.tags.get("technique") == entry and not parent_id(run))

    def children_of(self, parent: Run, store: str | None = None) -> dict[str, Run]:
        """Return a parent's children by name, the oldest first."""
        children = [run for run in self.runs(store) if parent_id(run) == parent.info.run_id]
        return {str(run.info.run_name): run for run in sorted(children, key=lambda run: run.info.start_time)}

    def only_run(self, entry: str, store: str | None = None) -> tuple[Run, Run]:
        """Return the newest parent run of an entry point, and its only child."""
        parent = self.parent_of(entry, store)
        [child] = self.children_of(parent, store).values()
        return parent, child


@contextlib.contextmanager
def _redirected(
    number: int, redirect: Callable[[IO[str]], contextlib.AbstractContextManager[IO[str]]]
) -> Iterator[IO[str]]:
    """Let what this process and those that it starts write to a descriptor go to the file that is given."""
    kept = os.dup(number)
    with tempfile.NamedTemporaryFile("w", buffering=1, newline="") as file:
        os.dup2(file.fileno(), number)
        try:
            with redirect(file):
                yield file
        finally:
            os.dup2(kept, number)
            os.close(kept)


def _text(file: IO[str]) -> str:
    file.flush()
    return Path(file.name).read_bytes().decode()


@cache
def _empty_store() -> Path:
    file = Path(tempfile.mkdtemp()) / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


def new_store(folder: Path) -> str:
    """Put an empty tracking store into a folder, which MLflow would take seconds to make, and return its URI."""
    shutil.copy(_empty_store(), folder / "mlflow.db")
    return f"sqlite:///{folder}/mlflow.db"


def as_words(settings: Mapping[str, str]) -> list[str]:
    """Return settings as words of a command line."""
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def parent_id(run: Run) -> str | None:
    """Return the id of a run's parent."""
    tag: str | None = run.data.tags.get("mlflow.parentRunId")
    return tag
