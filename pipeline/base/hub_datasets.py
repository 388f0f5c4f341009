"""Datasets of the Hugging Face hub, loaded with the optional package datasets."""

from typing import Any

from pipeline.base.errors import InvalidInputError


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
    try:
        return datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InvalidInputError(
            f"the dataset {name} could not be loaded ({str(error).splitlines()[0]}); check the network and "
            "the name, or use a corpus of local files"
        ) from error
