"""Datasets of the Hugging Face hub, loaded with the optional package datasets."""

from pathlib import Path
from typing import Any

from pipeline.base.errors import InvalidInputError, first_line, origin
from pipeline.data._support.checkpoints import hub_or_cache

OF_FILES = {"chat": "chat.path", "hub": "corpus=text_files, text_files.path"}
"""What reads files, by the corpus that reads datasets."""


def load_dataset(corpus: str, name: str, config: str | None, split: str) -> Any:
    """Return one split of a dataset of the hub, or of a local folder of data files, for the corpus `corpus`.

    Raises:
        InvalidInputError: the package datasets is not installed, or the dataset cannot be loaded.

    """
    try:
        import datasets
    except ImportError as error:
        raise InvalidInputError(
            f"{corpus}.name needs the package datasets, which is not installed; pip install '.[hub]' in the checkout"
        ) from error
    if Path(name).is_file():
        raise InvalidInputError(
            f"{corpus}.name must name a dataset or a folder, and {name} is a file; set {OF_FILES[corpus]}={name}"
        )
    try:
        with hub_or_cache(name):
            return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # of its network's libraries too
        raise InvalidInputError(
            f"the dataset {name} could not be loaded ({first_line(origin(error))}); check the network and the name, or "
            f"read files of this machine: {OF_FILES[corpus]}"
        ) from error
