"""What is known of a training command that many use: how it calls the usual levers, and which of them change what."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pipeline.base.technique import Mathematics
from pipeline.config.command import ACCUMULATION, MICRO_BATCH


@dataclass(frozen=True, kw_only=True)
class Lever:
    """An option of a command that changes memory and time."""

    name: str
    values: tuple[str, ...]
    """The plain one first."""
    mathematics: Mathematics
    """How far other values than the first change the training."""
    is_usual: bool = False
    """Whether it is searched without being asked for."""


LIGER = Lever(name="use_liger_kernel", values=("false", "true"), mathematics=Mathematics.ROUNDING)
COMPILE = Lever(name="torch_compile", values=("false", "true"), mathematics=Mathematics.ROUNDING)
OPTIMIZER = Lever(
    name="optim",
    values=("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "adafactor"),
    mathematics=Mathematics.DIFFERENT,
)
"""Options of transformers' TrainingArguments, which other commands take too."""


class KnownCommand(ABC):
    """A training command of which options or keys are known; a file of `known_commands` has one subclass."""

    batch_options: ClassVar[Mapping[str, str]] = {
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
    }
    """Its options of the batch, each with the placeholder of its value."""
    levers: ClassVar[tuple[Lever, ...]] = ()
    """Those that its options set."""
    settings_file: ClassVar[int | None] = None
    """Number of the word that names a file whose keys are its settings; None if it has options."""

    @classmethod
    @abstractmethod
    def recognizes(cls, words: Sequence[str]) -> bool:
        """Whether a command is one of these."""
