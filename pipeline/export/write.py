"""The files for other frameworks, written from an Experiment."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment
from pipeline.config.settings import discover
from pipeline.export.facts import Facts, facts_for, facts_of
from pipeline.export.literals import LINE_LENGTH
from pipeline.export.target import Target, render

TARGETS = discover("export.targets", Target)  # type: ignore[type-abstract]


def export_files(experiment: Experiment) -> dict[str, str]:
    """Return the texts by file name; README.md says how each file is used, and what it cannot express.

    Raises:
        InvalidInputError: the corpus or the model cannot be read.

    """
    shared = facts_of(experiment)
    texts: dict[str, str] = {}
    sections: list[tuple[list[str], str, list[str]]] = []
    for name, kind in TARGETS.items():
        target, facts = kind(), facts_for(shared, experiment, name, kind.techniques, takes_code=kind.takes_code)
        files = {file: _with_warnings(file, text, facts) for file, text in target.files(facts).items()}
        if files:
            texts |= files
            sections.append((list(files), target.purpose, target.notes(facts)))
    return {"README.md": render("README.md.jinja", shared, sections=sections), **texts}


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Write files into a folder, which is created if it does not exist.

    Raises:
        InvalidInputError: the folder cannot be written.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise InvalidInputError(
            f"the folder of the files must be writable, and {folder} is not ({error.strerror}); set output to another"
        ) from error


def _with_warnings(file: str, text: str, facts: Facts) -> str:
    """Return a file with a comment at its top for each technique that it lacks; JSON has no comments."""
    if file.endswith(".json"):
        return text
    lines = [line for sentence in facts.missing for line in textwrap.wrap(sentence, LINE_LENGTH)]
    return "".join(f"# {line}\n" for line in lines) + text
