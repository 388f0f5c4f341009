"""The answer of a search in a form that runs: a configuration and its exports, or the user's own command."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from pipeline.base.errors import first_line
from pipeline.base.files import write_atomically
from pipeline.config.command import Command
from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice
from pipeline.jobs.published_type import published_type_note
from pipeline.searching.interface import Problem
from pipeline.searching.results import SearchFindings

BEST_SCRIPT = "best.sh"


class Answer(Protocol):
    """The fastest configuration that fits."""

    def write(self, findings: SearchFindings, job: Any) -> SearchFindings:
        """Log the answer as files, and return the findings with what runs it; before the report is made."""

    def hand_over(self, job: Any, console: Console) -> None:
        """Print what runs it, after the report."""


def answer_of(problem: Problem, choice: Choice) -> Answer:
    """Return the answer of a search: this configuration of its problem."""
    runnable = problem.runnable(choice)
    if isinstance(runnable, Command):
        return _CommandAnswer(runnable)
    assert isinstance(runnable, Experiment)
    return _ExperimentAnswer(runnable)


@dataclass(frozen=True)
class _ExperimentAnswer:
    """A configuration of Fitproof's own training: best.yaml, and files for other trainers."""

    experiment: Experiment

    def write(self, findings: SearchFindings, job: Any) -> SearchFindings:
        config = self.experiment.to_yaml()
        _write(job, "best.yaml", config)
        note = published_type_note(self.experiment)
        return replace(findings, notes=(*findings.notes, f"the answer: {note}")) if note else findings

    def hand_over(self, job: Any, console: Console) -> None:
        """Log the files that train the answer in other frameworks; a technique's own code that fails is reported."""
        from pipeline.export.write import export_files

        try:
            files = export_files(self.experiment)
        except Exception as error:  # whatever a technique's export() raises
            reason = f"{type(error).__name__}: {first_line(error)}"
            console.print(f"the answer cannot be exported: {reason}", highlight=False)
            files = {}
        for name, content in files.items():
            job.file(f"handover/{name}", content, "handover")
        console.print("run it: fitproof main --config best.yaml", highlight=False)


@dataclass(frozen=True)
class _CommandAnswer:
    """The user's command with the best values."""

    command: Command

    def write(self, findings: SearchFindings, job: Any) -> SearchFindings:
        for path, text in self.command.files.items():
            _write(job, f"best-{Path(path).name}", text)
        _write(job, BEST_SCRIPT, f"{self._best.line}\n")
        return replace(findings, command=self._best.line)

    def hand_over(self, job: Any, console: Console) -> None:
        console.print("run it:", highlight=False)
        console.print(self._best.line, highlight=False, soft_wrap=True)

    @property
    def _best(self) -> Command:
        """The command that reads the patched files of the current folder."""
        return replace(self.command, words=self.command.with_names("best-"))


def _write(job: Any, name: str, content: str) -> None:
    """Log a file, and write it into the current folder too."""
    job.file(name, content)
    with contextlib.suppress(OSError):  # a convenience: the job's own folder has it too
        write_atomically(Path(name), content.encode())
