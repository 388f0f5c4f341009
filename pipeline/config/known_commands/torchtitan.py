"""`torchrun ... -m torchtitan.train`, which accumulates up to its global batch."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pipeline.base.technique import Mathematics
from pipeline.config.command import EFFECTIVE_BATCH
from pipeline.config.known_command import CHECKPOINTING, KnownCommand, Lever
from pipeline.config.space import MICRO_BATCH


class Torchtitan(KnownCommand):
    """torchtitan's training, of which 0.3 chooses checkpointing by its configuration instead of an option."""

    batch_options: ClassVar[Mapping[str, str]] = {
        "training.local_batch_size": MICRO_BATCH,
        "training.global_batch_size": EFFECTIVE_BATCH,
    }
    levers: ClassVar[tuple[Lever, ...]] = (
        Lever(
            name="activation_checkpoint.mode",
            values=("none", "selective", "full"),
            mathematics=Mathematics.EXACT,
            by_memory=("none", "selective", "full"),
            price=CHECKPOINTING.price,
        ),
        Lever(
            name="training.mixed_precision_param",
            values=("float32", "bfloat16"),
            mathematics=Mathematics.ROUNDING,
        ),
    )

    @classmethod
    def recognizes(cls, words: Sequence[str]) -> bool:
        """Whether it runs torchtitan's module, or the file of it."""
        return any(word == "torchtitan.train" or word.endswith("torchtitan/train.py") for word in words)
