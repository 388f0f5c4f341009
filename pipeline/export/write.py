"""The files for other frameworks, written from an Experiment."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment
from pipeline.config.settings import discover
from pipeline.export.facts import Facts, facts_for, facts_of
from pipeline.export.literals import LINE_LENGTH
from pipeline.export.target import Target, render

HEADING = "# A measured configuration for other frameworks"
"""How the README.md of an export begins."""
TARGETS = discover("export.targets", Target)  # type: ignore[type-abstract]


@dataclass(frozen=True, kw_only=True)
class TargetFiles:
    """The files of one framework."""

    texts: Mapping[str, str]
    """By file name."""
    purpose: str
    """How they are used, in a sentence."""
    missing: tuple[str, ...] = ()
    """What they cannot express of the configuration, a sentence each."""
    notes: tuple[str, ...] = ()
    """What a user of them needs to know, a sentence each; what is missing comes first."""


def export_files(experiment: Experiment) -> dict[str, str]:
    """Return the texts by file name; README.md says how each file is used, and what it cannot express.

    Raises:
        InvalidInputError: the corpus or the model cannot be read.

    """
    return {file: text for target in files_by_target(experiment) for file, text in target.texts.items()}


def files_by_target(experiment: Experiment) -> tuple[TargetFiles, ...]:
    """Return README.md, then the files of each framework that can train the model.

    Raises:
        InvalidInputError: the corpus or the model cannot be read.

    """
    if experiment.description.pairs:
        raise InvalidInputError(
            f"files for other frameworks train documents one by one, and {experiment.settings.model} is trained for "
            f"{experiment.family} on pairs; train it by fitproof main --config FILE, or search TRL's own training by "
            f"fitproof search -- trl {experiment.family} --config FILE"
        )
    shared, found = facts_of(experiment), []
    for name, kind in TARGETS.items():
        target, facts = kind(), facts_for(shared, experiment, name, takes_code=kind.takes_code)
        texts = {file: _with_warnings(file, text, facts) for file, text in target.files(facts).items()}
        if texts:
            notes = tuple(target.notes(facts))
            found.append(TargetFiles(texts=texts, purpose=target.purpose, missing=facts.missing, notes=notes))
    readme = {"README.md": render("README.md.jinja", shared, targets=found)}
    return (TargetFiles(texts=readme, purpose="How each file is used, and what it cannot express."), *found)


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Write files into a folder, which is created if it does not exist.

    Raises:
        InvalidInputError: the folder cannot be written.

    """
    own = next((name for name in files if (folder / name).exists()), None)
    if own is not None and not _is_export(folder):
        raise InvalidInputError(
            f"the folder of the files must be new or of an earlier export, and {folder} has a {own} of its own; set "
            "output to another"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise InvalidInputError(
            f"the folder of the files must be writable, and {folder} is not ({error.strerror}); set output to another"
        ) from error


def _is_export(folder: Path) -> bool:
    readme = folder / "README.md"
    return readme.is_file() and readme.read_text(errors="replace").startswith(HEADING)


def _with_warnings(file: str, text: str, facts: Facts) -> str:
    """Return a file with a comment at its top for each technique that it lacks; JSON has no comments."""
    if file.endswith(".json"):
        return text
    lines = [line for sentence in facts.missing for line in textwrap.wrap(sentence, LINE_LENGTH)]
    return "".join(f"# {line}\n" for line in lines) + text
