"""A copy of the project in a folder of its own, and the commands that a user would run there."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlflow
import pytest
import yaml
from conftest import ROOT, THREE_LEVERS
from mlflow.entities import Run

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


@dataclass
class Project:
    """The folder, and the environment in which its commands run."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def copy(cls, folder: Path, with_store: bool = True) -> "Project":
        """Copy what git tracks and what it would, and with it an empty tracking store, which takes seconds to make.

        A search or a plan has few configurations there, unless it is given a space.
        """
        listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for name in (name for name in names if (ROOT / name).exists()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
        for entry in ("search", "plan"):
            file = folder / "experiments" / f"{entry}.yaml"
            values = {**yaml.safe_load(file.read_text()), "space": THREE_LEVERS}
            file.write_text(yaml.safe_dump(values, sort_keys=False))
        project = cls(folder)
        if with_store:
            shutil.copy(_empty_store(), folder / "mlflow.db")
        return project

    @property
    def store(self) -> str:
        """The tracking store of its runs, the same that MLflow finds by default."""
        return f"sqlite:///{self.folder}/mlflow.db"

    def popen(self, *words: str, **options: Any) -> "subprocess.Popen[str]":
        """Start a command as a user of the project's virtual environment would."""
        binaries = Path(sys.executable).parent
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
        environment = {**inherited, "PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": "", **self.environment}
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
        return self.call("python", "-m", "pipeline", entry, *as_words(settings))

    def here(self, entry: str, settings: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
        """Run an entry point of this project in this process, which has loaded already what takes a new one seconds."""
        words, out, err = [entry, *as_words(settings)], io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.MonkeyPatch.context() as patch,
        ):
            for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
                patch.delenv(name)
            for name, value in {"MLFLOW_TRACKING_URI": self.store, **self.environment}.items():
                patch.setenv(name, value)
            return subprocess.CompletedProcess(words, main(words), out.getvalue(), err.getvalue())

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


@cache
def _empty_store() -> Path:
    file = Path(tempfile.mkdtemp()) / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


def as_words(settings: Mapping[str, str]) -> list[str]:
    """Return settings as words of a command line."""
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def parent_id(run: Run) -> str | None:
    """Return the id of a run's parent."""
    tag: str | None = run.data.tags.get("mlflow.parentRunId")
    return tag
