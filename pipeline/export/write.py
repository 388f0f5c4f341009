"""An Experiment -> the files that other frameworks take."""

from collections.abc import Mapping
from pathlib import Path

from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment
from pipeline.config.settings import discover
from pipeline.export.facts import facts_of
from pipeline.export.target import Target, render

TARGETS = discover("handover.targets", Target)  # type: ignore[type-abstract]


def export_files(experiment: Experiment) -> dict[str, str]:
    """Return the texts by file name; README.md among them says what each is for and what it cannot say.

    Raises:
        InvalidInputError: the corpus or the model cannot be read.

    """
    facts = facts_of(experiment)
    written = {target: target.files(facts) for target in (kind() for kind in TARGETS.values())}
    index = [(target, list(files)) for target, files in written.items() if files]
    texts = {name: text for files in written.values() for name, text in files.items()}
    return {"README.md": render("README.md.jinja", facts, targets=index), **texts}


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Write files into a folder, which is made where it is missing.

    Raises:
        InvalidInputError: the folder cannot be written.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise InvalidInputError(
            f"the handover's folder must be writable, and {folder} is not ({error.strerror}); set output to another"
        ) from error
