"""The template of a command: `{name}` and `{name:value,value}` stand for values, `{--flag}` for a flag or nothing."""

import hashlib
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pipeline.base.errors import InvalidInputError
from pipeline.config.command import ACCUMULATION, names_file
from pipeline.config.command_options import with_option
from pipeline.config.known_command import KnownCommand, Lever
from pipeline.config.patched_file import FORMATS, PatchedFile, read_patched_file
from pipeline.config.settings import discover
from pipeline.config.space import MICRO_BATCH, Value

PLACEHOLDER = re.compile(r"\{(?P<flag>--)?(?P<name>[A-Za-z_][\w.-]*)(?::(?P<values>[^{}]*))?\}")
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""A number as JSON and TOML write it."""
PROCESSES = re.compile(r"--(nproc[-_]per[-_]node|num[-_]processes|nnodes)(=(?P<value>\d+))?")
"""Options by which torchrun and accelerate are told how many processes and machines there are."""
EXPANDED = re.compile(r"[a-z_]\w*:[\w.+-]+")
"""What bash makes of the first value of an unquoted {name:value,value}."""
LARGEST_FILE = 2**24
"""Bytes of the largest file of a command that is read, to tell whether it has changed."""
KNOWN = discover("config.known_commands", KnownCommand)
MICRO_BATCH_KEYS = ("micro_batch_size", "per_device_train_batch_size")
ACCUMULATION_KEYS = ("gradient_accumulation_steps",)
"""Keys of files that axolotl, TRL, LLaMA-Factory and transformers call the two by."""


@dataclass(frozen=True)
class Template:
    """A command with placeholders, in its words, in the files that it reads, and among its environment variables."""

    words: tuple[str, ...]
    patches: Mapping[PatchedFile, Mapping[str, str]] = field(default_factory=dict)
    """The files of which each run reads a copy: the placeholder of each key that has other values, with its values."""
    variables: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """The values of environment variables; an empty one leaves it as it is."""
    levers: Mapping[str, Lever] = field(default_factory=dict)
    """Of a known command, by name; placeholders or not."""

    @cached_property
    def placeholders(self) -> Mapping[str, tuple[Value, ...]]:
        """The values that are written behind each placeholder, in their order; a flag has False and True.

        Raises:
            InvalidInputError: a flag is not a word of its own, or a placeholder has values in two places.

        """
        found: dict[str, tuple[Value, ...]] = {}
        texts = [text for keys in self.patches.values() for text in keys.values()]
        for text in (*self.words, *texts):
            for match in PLACEHOLDER.finditer(text):
                name, values = match["name"], _values_of(match, text)
                known = found.get(name, values)
                if known and values and known != values:
                    raise InvalidInputError(
                        f"the placeholder {{{name}}} has values in two places, {_written(known)} and "
                        f"{_written(values)}; write them behind the first alone, or give one of them another name"
                    )
                if name not in self._paths:
                    found[name] = known or values
        return {**found, **self.variables}

    def words_with(self, values: Mapping[str, Value]) -> tuple[str, ...]:
        """Return its words; one that is a placeholder with an empty value is left out.

        A placeholder without a value stays as it is written.
        """
        known = {**values, **self._paths}
        return tuple(filled for word in self.words for filled in _filled(word, known))

    def files_with(self, values: Mapping[str, Value]) -> dict[str, str]:
        """Return the text of each patched file, by its name in the command."""
        known = {**values, **self._paths}
        return {
            file.path: file.with_values({key: _value_of(_replaced(text, known)) for key, text in texts.items()})
            for file, texts in self.patches.items()
        }

    @property
    def _paths(self) -> dict[str, Value]:
        """The values of placeholders that name a patched file."""
        return {file.path: file.path for file in self.patches}

    def environment_with(self, values: Mapping[str, Value]) -> dict[str, str]:
        """Return the environment variables that have a value."""
        return {name: _text(values[name]) for name in self.variables if values[name]}

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
        return None if not counts else math.prod(counts)

    @property
    def digests(self) -> dict[str, str]:
        """A digest of each file that the command names: other content may be another training."""
        words = [*self.words, *(file.path for file in self.patches)]
        files = [path for path in files_of(words) if path.stat().st_size <= LARGEST_FILE]
        return {f"file.{path}": hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}


def files_of(words: Iterable[str]) -> list[Path]:
    """Return the files that words of a command are, or that follow their `=`."""
    names = [name for word in words for name in (word, word.partition("=")[2])]
    return [Path(name) for name in names if os.path.isfile(name)]  # noqa: PTH113  # also of words that no path may be


def make_template(command: str, patch: str | None, variables: str | None, asked_for: Iterable[str] = ()) -> Template:
    """Return the template of a command line, with `FILE key=value,value ...` to patch and `NAME=value,value ...`.

    A known command without a placeholder has those of its micro-batch, its accumulation and its usual levers, and in
    any case the levers that are `asked_for`.

    Raises:
        InvalidInputError: one of them is not of that form, a file has no such key, or the command does not read it.

    """
    words, parts = tuple(words_of(command)), words_of(patch or "")
    known = known_command(words)
    settings_file = None if known is None else known.settings_file(words)
    if settings_file is not None and not parts:
        parts = [settings_file]
    levers = {} if known is None else {lever.name: lever for lever in known.levers}
    if known is not None and settings_file is None:
        words = _with_options(words, known, set(asked_for))
    return Template(words, _patches(words, parts), dict(_variables(variables or "")), levers)


def words_of(text: str) -> list[str]:
    """Return the words of a command line.

    Raises:
        InvalidInputError: a quote is not closed.

    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidInputError(
            f"each quote of a command must be closed, and {text!r} has one that is not; close it, or write \\' for an "
            "apostrophe"
        ) from error


def known_command(words: Sequence[str]) -> type[KnownCommand] | None:
    """Return what is known of a command; None if it is not one that many use."""
    return next((one for one in KNOWN.values() if one.recognizes(words)), None)


def _with_options(words: tuple[str, ...], known: type[KnownCommand], asked_for: set[str]) -> tuple[str, ...]:
    """Return the words of a known command with placeholders for its options: the usual ones if it has none itself."""
    is_plain = not any(map(PLACEHOLDER.search, words))
    options = {name: f"{{{value}}}" for name, value in known.batch_options.items()} if is_plain else {}
    for lever in known.levers:
        if lever.name in asked_for or (lever.is_usual and is_plain and known.value_of(words, lever.name) is None):
            options[lever.name] = f"{{{lever.name}:{','.join(lever.values)}}}"
    for name, placeholder in options.items():
        words = with_option(words, name, placeholder)
    return words


def _patches(words: Sequence[str], parts: Sequence[str]) -> dict[PatchedFile, Mapping[str, str]]:
    """Return the placeholders of each key of a patched file, which may be named several times."""
    found: dict[PatchedFile, dict[str, str]] = {}
    if parts and "=" in parts[0]:
        raise InvalidInputError(f"patch begins with a file, and is {parts[0]!r}; write --patch 'FILE key=value,value'")
    starts = [number for number, part in enumerate(parts) if "=" not in part]
    for start, end in zip(starts, [*starts[1:], len(parts)], strict=False):
        if start > 0 and not parts[start].endswith(FORMATS):
            raise InvalidInputError(
                f"a key of a patched file has its values behind it, and {parts[start]} has none; write "
                f"{parts[start]}=value,value"
            )
        file = read_patched_file(parts[start])
        if not any(names_file(word, file.path) or f"{{{file.path}}}" in word for word in words):
            raise InvalidInputError(
                f"a patched file is one that the command reads, and {file.path} is not in {shlex.join(words)}; name it "
                f"there in the same way, or write {{{file.path}}} where it belongs"
            )
        given = [part.partition("=") for part in parts[start + 1 : end]]
        texts = found.setdefault(file, {})
        for key, _, text in given:
            file.check(key)
            texts[key] = text if PLACEHOLDER.search(text) else f"{{{key}:{text}}}"
    return {file: {**_usual_keys(words, file, texts), **texts} for file, texts in found.items()}


def _usual_keys(words: Sequence[str], file: PatchedFile, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the placeholders of the micro-batch and the accumulation that a file has by their usual names."""
    if any(f"{{{MICRO_BATCH}" in text for text in (*words, *texts.values())):
        return {}
    known = list(file.values)
    sizes = [key for key in known if key.rpartition(".")[2] in MICRO_BATCH_KEYS]
    steps = [key for key in known if key.rpartition(".")[2] in ACCUMULATION_KEYS]
    if len(sizes) != 1 or len(steps) != 1:
        return {}
    return {sizes[0]: f"{{{MICRO_BATCH}}}", steps[0]: f"{{{ACCUMULATION}}}"}


def _variables(text: str) -> Iterator[tuple[str, tuple[Value, ...]]]:
    for part in words_of(text):
        name, equals, values = part.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidInputError(
                f"env is written as NAME=value,value, and has {part!r}; an empty value leaves it as it is"
            )
        yield name, tuple(dict.fromkeys(values.split(",")))


def _values_of(match: re.Match[str], word: str) -> tuple[Value, ...]:
    """Return the values of a placeholder that are written in a word."""
    text = match["values"]
    if match["flag"] is None:
        return () if text is None else tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if match[0] != word or text is not None:
        raise InvalidInputError(
            "a flag that is there or not is a word of its own without values, and is "
            f"{word!r}; write {{--{match['name']}}}"
        )
    return (False, True)


def _filled(word: str, values: Mapping[str, Value]) -> Iterator[str]:
    whole = PLACEHOLDER.fullmatch(word)
    if whole is None or whole["name"] not in values:
        yield _replaced(word, values)
    elif whole["flag"]:
        if values[whole["name"]]:
            yield f"--{whole['name']}"
    else:
        yield from words_of(_text(values[whole["name"]]))


def _replaced(text: str, values: Mapping[str, Value]) -> str:
    return PLACEHOLDER.sub(lambda match: _text(values[match["name"]]) if match["name"] in values else match[0], text)


def _value_of(text: str) -> Any:
    """Return a value of a file; PyYAML alone takes 2e-4 for text."""
    return float(text) if EXPONENT.fullmatch(text) else yaml.safe_load(text)


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def _written(values: Sequence[Value]) -> str:
    return ",".join(map(_text, values))
