"""`trl sft` and its sisters, whose options override those of their configuration file."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pipeline.base.technique import Mathematics
from pipeline.config.known_command import BATCH_DEFAULTS, BF16, CHECKPOINTING, OF_TRAINER, KnownCommand, Lever

TRAININGS = ("sft", "dpo", "kto", "reward")
ON = ("true", "false")


class Trl(KnownCommand):
    """TRL's command line and its scripts; their checkpointing and bf16 are on unless they are switched off."""

    marks: ClassVar[tuple[str, ...]] = ("TrlParser",)
    batch_defaults: ClassVar[Mapping[str, str]] = BATCH_DEFAULTS
    levers: ClassVar[tuple[Lever, ...]] = (
        *(replace(one, values=ON) if one in (CHECKPOINTING, BF16) else one for one in OF_TRAINER),
        Lever(name="packing", values=("false", "true"), mathematics=Mathematics.DIFFERENT),
    )
    file_options: ClassVar[tuple[str, ...]] = ("config",)

    @classmethod
    def recognizes(cls, words: Sequence[str]) -> bool:
        """Whether it begins with `trl` and one of its trainings, or a script of it reads options as these do."""
        is_trl = len(words) > 1 and Path(words[0]).name == "trl" and words[1] in TRAININGS
        return is_trl or super().recognizes(words)
