"""Command: one run of anybody's training command, with every placeholder filled in."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline.config.experiment import Experiment
from pipeline.config.given import yaml_text
from pipeline.config.space import MICRO_BATCH, Value

ACCUMULATION, WORLD_SIZE = "accumulation_steps", "world_size"
EFFECTIVE_BATCH = "effective_batch_size"
"""Names of what follows from the effective batch, in params and as placeholders."""
NO_TERMINAL = (
    "a run has no terminal to read from: give what the script asks for as an option, in a file or as a variable"
)
"""The remedy for a script that asks, as by input() or getpass."""
ASKED = ("[Errno 9] Bad file descriptor", "EOFError", "/dev/tty")
"""What a script says that has asked where nobody answers."""


def remedies(output: str) -> list[str]:
    """Return what helps a command that ended with this output."""
    return [NO_TERMINAL] if any(sign in output for sign in ASKED) else []


@dataclass(frozen=True, kw_only=True)
class Command:
    """One run of a training command; every placeholder has its value."""

    words: tuple[str, ...]
    choice: Mapping[str, Value]
    """The value of each placeholder that has several."""
    device: torch.device
    effective_batch_size: int
    micro_batch_size: int | None
    """Sequences in one forward and backward pass; None if the command does not have it as a placeholder."""
    world_size: int
    """Processes that the command starts to train together."""
    budget_bytes: int | None
    """None if its memory is that of a simulated card, and its run is on another device."""
    num_steps: int
    timing_warmup_steps: int
    time_limit: float | None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the search sets."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The text of patched files, by the name that the command gives them."""

    @property
    def title(self) -> str:
        """The script, or else the program and what follows it."""
        scripts = [Path(word).name for word in self.words if word.endswith(".py")]
        return scripts[0] if scripts else " ".join(self.words[:2])

    @property
    def num_ranks_here(self) -> int:
        """None: the command starts its ranks itself."""
        return 0

    @property
    def accumulation_steps(self) -> int | None:
        """Forward and backward passes of a process in one optimizer step; None if the micro-batch is not known."""
        size = self.micro_batch_size
        return None if size is None else self.effective_batch_size // (size * self.world_size)

    def prepare(self) -> None:
        """Return None: the command reads its data itself."""

    def params(self) -> dict[str, Any]:
        """Return the command, its values, and the conditions of its run."""
        own = {
            "command": self.line,
            "effective_batch_size": self.effective_batch_size,
            MICRO_BATCH: self.micro_batch_size,
            ACCUMULATION: self.accumulation_steps,
            WORLD_SIZE: self.world_size,
            "device": str(self.device),
            "budget": None if self.budget_bytes is None else f"{self.budget_bytes / 2**20:g}MiB",
            "num_steps": self.num_steps,
            "timing_warmup_steps": self.timing_warmup_steps,
            "time_limit": self.time_limit,
        }
        return {**{name: value for name, value in own.items() if value is not None}, **self.choice, **self.environment}

    @property
    def line(self) -> str:
        """The command as it is written in a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words)])

    def with_copies(self, folder: Path) -> tuple[str, ...]:
        """Write the patched files into a folder, and return the words of the command that reads them there."""
        for path, text in self.files.items():
            (folder / self.copy_name(path)).write_text(text)
        return self.with_names(f"{folder}/")

    def with_names(self, prefix: str) -> tuple[str, ...]:
        """Return the words of the command that reads patched files whose names have a prefix in place of a folder."""
        words = self.words
        for path in self.files:
            copy = f"{prefix}{self.copy_name(path)}"
            words = tuple(word.removesuffix(path) + copy if names_file(word, path) else word for word in words)
        return words

    def copy_name(self, path: str) -> str:
        """Return the name of the copy of a patched file: its own, numbered where others have it too."""
        name = Path(path).name
        alike = [other for other in self.files if Path(other).name == name]
        return name if len(alike) == 1 else f"{alike.index(path) + 1}-{name}"

    def to_yaml(self) -> str:
        """Return the params as YAML."""
        return yaml_text(self.params())


def names_file(word: str, path: str) -> bool:
    """Whether a word of a command is a file, or an option with it."""
    return word == path or word.endswith(f"={path}")


Runnable = Experiment | Command
"""What runs in a process of its own and is measured."""
