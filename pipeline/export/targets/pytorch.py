"""PyTorch alone: a script that trains as was measured."""

from typing import ClassVar

from pipeline.export.facts import Facts
from pipeline.export.target import Target, render


class PyTorch(Target):
    """A script."""

    purpose: ClassVar[str] = (
        "In plain PyTorch, with the same losses step by step: `python train.py`, or `python train.py your_text.txt`."
    )

    def files(self, facts: Facts) -> dict[str, str]:
        """Return the script, for a model that transformers can build again."""
        return {} if facts.configuration is None else {"train.py": render("train.py.jinja", facts)}

    def notes(self, facts: Facts) -> list[str]:
        """Return what to know about its data."""
        return [
            "It reads the token ids that Headroom prepared, in the same order. Of a text file it takes the bytes as "
            "tokens; a .npy file holds the ids of any tokenizer in a row."
        ]
