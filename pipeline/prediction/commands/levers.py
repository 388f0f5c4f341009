"""The levers of a training command: options, marked values and variables that change the memory that it needs."""

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config.command import ACCUMULATION, EFFECTIVE_BATCH
from pipeline.config.command_options import option_of, with_option
from pipeline.config.command_template import KNOWN, Template, known_command
from pipeline.config.known_command import KnownCommand, Lever, scripts_of
from pipeline.config.space import MICRO_BATCH, Value
from pipeline.memory.allocator_options import are_segments_decided, with_expandable_segments

UNKNOWN_PRICE = "not known"
FIRST_WITH_BFLOAT16 = (8, 0)
"""Compute capability of the first cards with instructions for it."""
BFLOAT16, FLOAT16 = re.compile(r"bf16|bfloat16"), re.compile(r"\b(fp16|float16|16-mixed)")
"""What an option of one of the formats of 16 bits, or its value, is called."""
HAS_16_BITS = ("bf16", "fp16")
"""Options of which a command has one at most."""
SWITCHED = {"": "true", "1": "true", "yes": "true", "0": "false", "no": "false"}
"""Other ways to write whether an option is on."""
FREE = ("use_liger_kernel", "attn_implementation")
"""Levers that cost no time: they are tried first."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One lever of a command at another value."""

    lever: str
    shown: str
    """As it is written in a shell."""
    price: str
    """What it is expected to cost in time, and what else it changes."""
    options: Mapping[str, str | None] = field(default_factory=dict)
    """Options of the command and their values; None for an option without one."""
    marked: Mapping[str, Value] = field(default_factory=dict)
    """Values of placeholders."""
    variables: Mapping[str, str] = field(default_factory=dict)


def marks_of(template: Template) -> dict[str, tuple[Value, ...]]:
    """Return the values of each placeholder that has several; the command has the first of each.

    Those with a colon are a mapping of YAML, which stays as it is written.
    """
    values = {name: values for name, values in template.placeholders.items() if len(values) > 1}
    return {name: own for name, own in values.items() if not any(":" in str(value) for value in own)}


def command_with(template: Template, changes: Sequence[Change] = ()) -> tuple[str, ...]:
    """Return the command with these changes; what is written like a placeholder without values stays."""
    chosen = {name: values[0] for name, values in marks_of(template).items()}
    for change in changes:
        chosen.update(change.marked)
    words = template.words_with(chosen)
    for change in changes:
        for name, value in change.options.items():
            words = with_option(words, name, value)
    return words


def levers_of(
    template: Template, own: Mapping[str, Sequence[str]], python: Path, capability: tuple[int, int]
) -> tuple[tuple[Change, ...], ...]:
    """Return the levers of a command, each with its changes, the smallest first.

    First are those that cost no time, then the user's own (`own` has options of the command with the values to try),
    the batch, and the others of a known command in its order. A script that is not known has those of TrainingArguments
    that it names.
    """
    words = command_with(template)
    options = _Options(words, capability, python)
    known = [options.changes(lever) for lever in options.levers]
    found = [
        _expandable(),
        *(changes for changes in known if changes and changes[0].lever in FREE),
        *(_marked(name, values) for name, values in marks_of(template).items()),
        *(_option(name, values) for name, values in own.items()),
        options.smaller_batches(template.num_processes or 1),
        *(changes for changes in known if changes and changes[0].lever not in FREE),
    ]
    return tuple(changes for changes in found if changes)


class _Options:
    """The options of a command that are levers: those of a known command, or those of TrainingArguments."""

    def __init__(self, words: Sequence[str], capability: tuple[int, int], python: Path) -> None:
        self._words, self._capability, self._python = words, capability, python
        known = known_command(words)
        self._is_known = known is not None
        self._command: type[KnownCommand] = known or KNOWN["trainer"]
        self._script = "".join(scripts_of(words))
        self.levers: tuple[Lever, ...] = self._command.levers

    def changes(self, lever: Lever) -> tuple[Change, ...]:
        """Return the changes of a lever to values that need less memory than the one that it has."""
        if not self._takes(lever.name) or (lever.name in HAS_16_BITS and self._has_16_bits()):
            return ()
        now = self._now(lever)
        smaller = lever.by_memory[lever.by_memory.index(now) + 1 :] if now in lever.by_memory else ()
        return tuple(self._change(lever, value) for value in smaller if self._can_have(lever, value))

    def smaller_batches(self, num_processes: int) -> tuple[Change, ...]:
        """Return changes to smaller batches at the same number of sequences for each update."""
        options = {placeholder: name for name, placeholder in self._command.batch_options.items()}
        size = options[MICRO_BATCH]
        if not all(map(self._takes, options.values())):
            return ()
        values = {name: self._value(name) for name in options.values()}
        batch, steps = values[size] or "", values.get(options.get(ACCUMULATION, "")) or "1"
        if not batch.isdecimal() or not steps.isdecimal():
            return ()
        changes = []
        for parts in _powers_that_divide(int(batch)):
            changed = {size: str(int(batch) // parts)}
            if ACCUMULATION in options:
                changed[options[ACCUMULATION]] = str(int(steps) * parts)
            elif values[options[EFFECTIVE_BATCH]] is None:
                changed[options[EFFECTIVE_BATCH]] = str(int(batch) * num_processes)
            changes.append(
                Change(
                    lever=size,
                    shown=" ".join(f"--{name} {value}" for name, value in changed.items()),
                    price=f"the same work in {parts} times as many passes of 1/{parts} the size, which use the card "
                    "less well",
                    options=changed,
                )
            )
        return tuple(changes)

    def _takes(self, name: str) -> bool:
        """Whether the command has an option: a known one takes its own, a script also those that it names."""
        return (
            self._is_known or option_of(self._words, name) is not None or _named(name).search(self._script) is not None
        )

    def _value(self, name: str) -> str | None:
        """Return the value of an option, or its default if that is known."""
        given = self._command.value_of(self._words, name)
        return self._command.batch_defaults.get(name) if given is None and self._is_known else given

    def _now(self, lever: Lever) -> str:
        value = self._command.value_of(self._words, lever.name)
        return lever.values[0] if value is None else SWITCHED.get(value.lower(), value.lower())

    def _has_16_bits(self) -> bool:
        return any(self._now(lever) == "true" for lever in self.levers if lever.name in HAS_16_BITS)

    def _can_have(self, lever: Lever, value: str) -> bool:
        """Whether the environment and the card have what a value needs."""
        package = lever.packages.get(value)
        if package is not None and not _has_package(self._python, package):
            return False
        other = FLOAT16 if self._capability >= FIRST_WITH_BFLOAT16 else BFLOAT16
        return other.search(f"{lever.name}={value}") is None

    def _change(self, lever: Lever, value: str) -> Change:
        is_bare = not self._is_known and value == "true" and self._is_bare(lever.name)
        shown = f"--{lever.name}" if is_bare else f"--{lever.name} {value}"
        options = {lever.name: None if is_bare else value}
        return Change(lever=lever.name, shown=shown, price=lever.price, options=options)

    def _is_bare(self, name: str) -> bool:
        """Whether argparse takes the option without a value."""
        found = re.search(rf"{_named(name).pattern}(.{{0,200}})", self._script, re.DOTALL)
        return found is not None and "store_true" in found[1].partition("add_argument")[0]


def _named(name: str) -> re.Pattern[str]:
    """Return the pattern of an option in the source of a script that takes it."""
    return re.compile(rf"[\"']--{name.replace('_', '[_-]')}[\"']")


def _has_package(python: Path, name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0


def _expandable() -> tuple[Change, ...]:
    if are_segments_decided():
        return ()
    variables = with_expandable_segments()
    [(name, value)] = variables.items()
    return (Change(lever=name, shown=f"{name}={value}", price="none: no work is added", variables=variables),)


def _marked(name: str, values: Sequence[Value]) -> tuple[Change, ...]:
    return tuple(
        Change(lever=name, shown=f"{name}={value}", price=UNKNOWN_PRICE, marked={name: value}) for value in values[1:]
    )


def _option(name: str, values: Sequence[str]) -> tuple[Change, ...]:
    plain = name.lstrip("-")
    return tuple(
        Change(lever=plain, shown=f"--{plain} {value}", price=UNKNOWN_PRICE, options={plain: value}) for value in values
    )


def _powers_that_divide(number: int) -> Iterator[int]:
    parts = 2
    while number > 0 and number % parts == 0:
        yield parts
        parts *= 2
