"""An Experiment -> the files that other frameworks take."""

from collections.abc import Mapping
from pathlib import Path

from pipeline.contracts import InvalidInputError
from pipeline.experiment import Experiment
from pipeline.handover.facts import facts_of
from pipeline.handover.target import Target, render
from pipeline.settings import discover

TARGETS = discover("handover.targets", Target)  # type: ignore[type-abstract]


def hand_over(experiment: Experiment) -> dict[str, str]:
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
