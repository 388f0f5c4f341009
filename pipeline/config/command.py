"""Command: anybody's training command with every placeholder filled in, and the template that it is made from.

`{name}` and `{name:value,value}` in a word of the template stand for values, `{--flag}` for a flag that is there or
not.
"""

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from pipeline.base.errors import InvalidInputError
from pipeline.config.space import Choice, Value

MICRO_BATCH, ACCUMULATION, EFFECTIVE_BATCH, WORLD_SIZE = (
    "micro_batch_size",
    "accumulation_steps",
    "effective_batch_size",
    "world_size",
)
"""Placeholders whose values follow from the effective batch."""
PLACEHOLDER = re.compile(r"\{(?P<flag>--)?(?P<name>[A-Za-z_][\w.-]*)(?::(?P<values>[^{}]*))?\}")
PROCESSES = re.compile(r"--(nproc[-_]per[-_]node|num[-_]processes|nnodes)(=(?P<value>\d+))?")
"""Options by which torchrun and accelerate are told how many processes and machines there are."""
EXPANDED = re.compile(r"[a-z_]\w*:[\w.+-]+")
"""What bash makes of the first value of an unquoted {name:value,value}."""
LARGEST_FILE = 2**24
"""Bytes of the largest file of a command that is read, to tell whether it has changed."""


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
    budget_bytes: int
    num_steps: int
    timing_warmup_steps: int
    time_limit: float | None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the search sets."""

    @property
    def title(self) -> str:
        """The script, or else the program and what follows it."""
        scripts = [Path(word).name for word in self.words if word.endswith(".py")]
        return scripts[0] if scripts else " ".join(self.words[:2])

    @property
    def num_started(self) -> int:
        """One: the command starts its other processes itself."""
        return 1

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
            "budget": f"{self.budget_bytes / 2**20:g}MiB",
            "num_steps": self.num_steps,
            "timing_warmup_steps": self.timing_warmup_steps,
            "time_limit": self.time_limit,
        }
        return {**{name: value for name, value in own.items() if value is not None}, **self.choice}

    @property
    def line(self) -> str:
        """The command as it is written in a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words)])

    def to_yaml(self) -> str:
        """Return the params as YAML."""
        return yaml.safe_dump(self.params(), sort_keys=False)


@dataclass(frozen=True)
class Placeholder:
    """A placeholder of a template."""

    name: str
    is_flag: bool
    values: tuple[Value, ...]
    """Those that are written behind its name; a flag has False and True."""


@dataclass(frozen=True)
class Template:
    """A command with placeholders."""

    words: tuple[str, ...]

    @cached_property
    def placeholders(self) -> Mapping[str, Placeholder]:
        """The placeholders by name, in their order.

        Raises:
            InvalidInputError: a flag is not a word of its own, or a placeholder has values in two places.

        """
        found: dict[str, Placeholder] = {}
        for word in self.words:
            for match in PLACEHOLDER.finditer(word):
                one = _placeholder(match, word)
                known = found.get(one.name, one)
                if known.values and one.values and known.values != one.values:
                    raise InvalidInputError(
                        f"the placeholder {{{one.name}}} has values in two places, {_written(known.values)} and "
                        f"{_written(one.values)}; write them behind the first alone"
                    )
                found[one.name] = known if known.values else one
        return found

    def fill(self, values: Mapping[str, Value]) -> tuple[str, ...]:
        """Return the words of the command; a word that is one placeholder with an empty value is left out."""
        return tuple(filled for word in self.words for filled in _filled(word, values))

    @property
    def looks_expanded(self) -> bool:
        """Whether the shell seems to have taken the braces of a placeholder with values for its own."""
        pairs = zip(self.words, self.words[1:], strict=False)
        return any(EXPANDED.fullmatch(word) and not following.startswith("-") for word, following in pairs)

    @property
    def num_processes(self) -> int | None:
        """How many processes the command starts, by the options of its launcher; None if they do not say it."""
        counts = []
        for word, following in zip(self.words, (*self.words[1:], ""), strict=True):
            if match := PROCESSES.fullmatch(word):
                text = match["value"] or following
                counts += [int(text)] if text.isdecimal() else []
        return None if not counts else _product(counts)

    @property
    def digests(self) -> dict[str, str]:
        """A digest of each file that the command names: other content may be another training."""
        files = [path for path in map(Path, self.words) if path.is_file() and path.stat().st_size <= LARGEST_FILE]
        return {f"file.{path}": hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, the smallest first."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def derived_values(choice: Choice, effective_batch_size: int, world_size: int) -> dict[str, Value]:
    """Return the values of the placeholders that follow from a choice."""
    found: dict[str, Value] = {EFFECTIVE_BATCH: effective_batch_size, WORLD_SIZE: world_size}
    if MICRO_BATCH in choice:
        found[ACCUMULATION] = effective_batch_size // (int(str(choice[MICRO_BATCH])) * world_size)
    return found


def _placeholder(match: re.Match[str], word: str) -> Placeholder:
    name, text = match["name"], match["values"]
    if match["flag"] is None:
        return Placeholder(name, False, () if text is None else tuple(dict.fromkeys(text.split(","))))
    if match[0] != word or text is not None:
        raise InvalidInputError(
            f"a flag that is there or not is a word of its own without values, and is {word!r}; write {{--{name}}}"
        )
    return Placeholder(name, True, (False, True))


def _filled(word: str, values: Mapping[str, Value]) -> Iterator[str]:
    whole = PLACEHOLDER.fullmatch(word)
    if whole is None:
        yield PLACEHOLDER.sub(lambda match: _text(values[match["name"]]), word)
    elif whole["flag"]:
        if values[whole["name"]]:
            yield f"--{whole['name']}"
    else:
        yield from shlex.split(_text(values[whole["name"]]))


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def _written(values: Sequence[Value]) -> str:
    return ",".join(map(_text, values))


def _product(numbers: Sequence[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result
