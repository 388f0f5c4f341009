"""What is known of a training command that many use: how it calls the usual levers, and which of them change what."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from pipeline.base.technique import Mathematics
from pipeline.config.command import ACCUMULATION
from pipeline.config.command_options import option_of
from pipeline.config.patched_file import FORMATS, read_patched_file
from pipeline.config.space import MICRO_BATCH


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
    by_memory: tuple[str, ...] = ()
    """Values by the memory that they need, the most first; none: not known."""
    price: str = "not known"
    """What a value that needs less memory is expected to cost in time, and what else it changes."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """The package that a value needs."""


CHECKPOINTING = Lever(
    name="gradient_checkpointing",
    values=("false", "true"),
    mathematics=Mathematics.EXACT,
    is_usual=True,
    by_memory=("false", "true"),
    price="the forward pass of each layer is computed twice: about a third more work",
)
BF16 = Lever(
    name="bf16",
    values=("false", "true"),
    mathematics=Mathematics.ROUNDING,
    is_usual=True,
    by_memory=("false", "true"),
    price="less: products of matrices in 16 bits; other rounding",
)
FP16 = replace(BF16, name="fp16", is_usual=False)
LIGER = Lever(
    name="use_liger_kernel",
    values=("false", "true"),
    mathematics=Mathematics.ROUNDING,
    by_memory=("false", "true"),
    price="none: several operators become one kernel",
    packages={"true": "liger_kernel"},
)
COMPILE = Lever(name="torch_compile", values=("false", "true"), mathematics=Mathematics.ROUNDING)
ATTENTION = Lever(
    name="attn_implementation",
    values=("sdpa", "eager", "flash_attention_2"),
    mathematics=Mathematics.ROUNDING,
    by_memory=("eager", "sdpa"),
    price="less: the scores of all pairs of tokens are not written to memory; other rounding",
)
OPTIMIZER = Lever(
    name="optim",
    values=("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "adafactor"),
    mathematics=Mathematics.DIFFERENT,
    by_memory=("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adafactor"),
    price="about none; another optimizer: another training",
    packages={"adamw_bnb_8bit": "bitsandbytes"},
)
OF_TRAINER = (LIGER, ATTENTION, CHECKPOINTING, BF16, FP16, COMPILE, OPTIMIZER)
"""Those of transformers' TrainingArguments."""
BATCH_DEFAULTS = {"per_device_train_batch_size": "8", "gradient_accumulation_steps": "1"}
"""Options of transformers' TrainingArguments, which other commands take too, and the defaults of its batch."""


class KnownCommand:
    """A training command of which options or keys are known; a file of `known_commands` has one subclass."""

    batch_options: ClassVar[Mapping[str, str]] = {
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
    }
    """Its options of the batch, each with the placeholder of its value."""
    batch_defaults: ClassVar[Mapping[str, str]] = {}
    """The values of those that a command need not have."""
    levers: ClassVar[tuple[Lever, ...]] = ()
    """Those that its options set."""
    file_options: ClassVar[tuple[str, ...]] = ()
    """Options that name a file whose keys are options too."""

    marks: ClassVar[tuple[str, ...]] = ()
    """What a script of such a command has in its source."""

    @classmethod
    def recognizes(cls, words: Sequence[str]) -> bool:
        """Whether a command is one of these: by default, whether one of its scripts has all marks."""
        return bool(cls.marks) and any(all(mark in script for mark in cls.marks) for script in scripts_of(words))

    @classmethod
    def settings_file(cls, words: Sequence[str]) -> str | None:
        """Return the file whose keys are the settings of a command; None if it has options."""
        return None

    @classmethod
    def value_of(cls, words: Sequence[str], name: str) -> str | None:
        """Return the value of an option as the command has it, or the file that it names; None if neither does.

        Raises:
            InvalidInputError: the file cannot be read.

        """
        value = option_of(words, name)
        files = [option_of(words, option) for option in cls.file_options] if value is None else []
        for file in files:
            if file and file.endswith(FORMATS) and (found := read_patched_file(file).values.get(name)) is not None:
                return str(found)
        return value


def scripts_of(words: Sequence[str]) -> Iterator[str]:
    """Yield the source of each script of Python that a command names."""
    for word in words:
        if word.endswith(".py") and os.path.isfile(word):  # noqa: PTH113  a word may be too long for a path
            yield Path(word).read_text(errors="replace")
