"""Scripts that read transformers' TrainingArguments from the command line."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pipeline.config.known_command import BATCH_DEFAULTS, OF_TRAINER, KnownCommand, Lever, scripts_of

MARKS = ("TrainingArguments", "HfArgumentParser")
"""Names in a script that parses these arguments."""


class TrainerScript(KnownCommand):
    """A script of one's own, or one of transformers' examples."""

    batch_defaults: ClassVar[Mapping[str, str]] = BATCH_DEFAULTS
    levers: ClassVar[tuple[Lever, ...]] = OF_TRAINER

    @classmethod
    def recognizes(cls, words: Sequence[str]) -> bool:
        """Whether a script of the command names both the arguments and their parser."""
        return any(all(mark in script for mark in MARKS) for script in scripts_of(words))
