"""Scripts that read transformers' TrainingArguments from the command line."""

from collections.abc import Mapping
from typing import ClassVar

from pipeline.config.known_command import BATCH_DEFAULTS, OF_TRAINER, KnownCommand, Lever


class TrainerScript(KnownCommand):
    """A script of one's own, or one of transformers' examples."""

    marks: ClassVar[tuple[str, ...]] = ("TrainingArguments", "HfArgumentParser")
    batch_defaults: ClassVar[Mapping[str, str]] = BATCH_DEFAULTS
    levers: ClassVar[tuple[Lever, ...]] = OF_TRAINER
