"""The answer of a search in a form that runs: a configuration and its exports, or the user's own command."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.files import write_atomically
from pipeline.config.command import Command
from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice
from pipeline.jobs.notes import published_type_note
from pipeline.searching.problem import Problem
from pipeline.searching.results import SearchFindings

BEST_SCRIPT = "best.sh"


def write_answer(problem: Problem, choice: Choice, findings: SearchFindings, job: Any) -> SearchFindings:
    """Log the fastest configuration that fits as files, and return the findings with what runs it."""
    runnable = problem.runnable(choice)
    if isinstance(runnable, Command):
        return _write_command(runnable, findings, job)
    return _write_experiment(runnable, findings, job)


def _write_experiment(experiment: Experiment, findings: SearchFindings, job: Any) -> SearchFindings:
    """Log best.yaml, and the files that train the answer in other frameworks; an export that fails is reported."""
    from pipeline.export.write import export_files
    from pipeline.report.page import HANDOVER

    _write(job, "best.yaml", experiment.to_yaml())
    note = published_type_note(experiment)
    notes = [f"the answer: {note}"] if note else []
    try:
        files = export_files(experiment)
    except Exception as error:  # whatever a technique's export() raises
        files = {}
        kind = "" if isinstance(error, InvalidInputError) else f"{type(error).__name__}: "
        notes.append(f"the answer cannot be exported: {kind}{first_line(error)}")
    for name, content in files.items():
        job.file(f"{HANDOVER}/{name}", content, HANDOVER)
    return replace(findings, notes=(*findings.notes, *notes))


def _write_command(command: Command, findings: SearchFindings, job: Any) -> SearchFindings:
    """Log the user's command with the best values, which reads the patched files of the current folder."""
    for path, text in command.files.items():
        _write(job, f"best-{command.copy_name(path)}", text)
    line = replace(command, words=command.with_names("best-")).line
    _write(job, BEST_SCRIPT, f"{line}\n")
    return replace(findings, command=line)


def _write(job: Any, name: str, content: str) -> None:
    """Log a file, and write it into the current folder too."""
    job.file(name, content)
    with contextlib.suppress(OSError):  # a convenience: the job's own folder has it too
        write_atomically(Path(name), content.encode())
