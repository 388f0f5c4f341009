"""`trl sft` and its sisters, whose options override those of their configuration file."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pipeline.base.technique import Mathematics
from pipeline.config.known_command import COMPILE, LIGER, OPTIMIZER, KnownCommand, Lever

TRAININGS = ("sft", "dpo", "kto", "reward")


class Trl(KnownCommand):
    """TRL's command line; its checkpointing and bf16 are on unless they are switched off."""

    levers: ClassVar[tuple[Lever, ...]] = (
        Lever(
            name="gradient_checkpointing",
            values=("true", "false"),
            mathematics=Mathematics.EXACT,
            is_usual=True,
        ),
        Lever(name="bf16", values=("true", "false"), mathematics=Mathematics.ROUNDING, is_usual=True),
        LIGER,
        COMPILE,
        Lever(
            name="attn_implementation",
            values=("sdpa", "eager", "flash_attention_2"),
            mathematics=Mathematics.ROUNDING,
        ),
        Lever(name="packing", values=("false", "true"), mathematics=Mathematics.DIFFERENT),
        OPTIMIZER,
    )

    @classmethod
    def recognizes(cls, words: Sequence[str]) -> bool:
        """Whether it begins with `trl` and one of its trainings."""
        return len(words) > 1 and Path(words[0]).name == "trl" and words[1] in TRAININGS
