"""Scripts that read transformers' TrainingArguments from the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pipeline.base.technique import Mathematics
from pipeline.config.known_command import COMPILE, LIGER, OPTIMIZER, KnownCommand, Lever

MARKS = ("TrainingArguments", "HfArgumentParser")
"""Names in a script that parses these arguments."""


class TrainerScript(KnownCommand):
    """A script of one's own, or one of transformers' examples."""

    levers: ClassVar[tuple[Lever, ...]] = (
        Lever(
            name="gradient_checkpointing",
            values=("false", "true"),
            mathematics=Mathematics.EXACT,
            is_usual=True,
        ),
        Lever(name="bf16", values=("false", "true"), mathematics=Mathematics.ROUNDING, is_usual=True),
        LIGER,
        COMPILE,
        OPTIMIZER,
    )

    @classmethod
    def recognizes(cls, words: Sequence[str]) -> bool:
        """Whether a script of the command names both the arguments and their parser."""
        scripts = [Path(word) for word in words if word.endswith(".py") and Path(word).is_file()]
        return any(all(mark in script.read_text(errors="replace") for mark in MARKS) for script in scripts)
