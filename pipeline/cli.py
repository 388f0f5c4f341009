"""The command line: `fitproof ENTRY --setting value ...`, where ENTRY is an entry point or a tool.

Modules that load torch are imported inside functions, so that `fitproof` alone answers at once.
"""

import argparse
import errno
import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pipeline.base.errors import InvalidInputError
from pipeline.config.entry_points import (
    ALIASES,
    BEST_FILE,
    EXISTING,
    SINGLE,
    TOOLS,
    entry_points,
    find_file,
    questions,
    yaml_file,
)
from pipeline.runtime.signals import INTERRUPTED, interrupt_on_signal

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.base.contracts import Settings

WIDTH_OF_FILES = 120
"""Columns of the tables where the output is no terminal."""
HEADLINE = (
    "model",
    "corpus",
    "device",
    "num_steps",
    "sequence_length",
    "micro_batch_size",
    "effective_batch_size",
    "precision",
    "checkpointing",
    "budget",
    "output",
)
"""Settings that `--help` lists first: those that most runs set."""


def main(argv: list[str] | None = None) -> int:
    """Run an entry point and return the exit code: 0 done, 1 nothing completed, 2 invalid input, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(usage())  # noqa: T201
        return 0
    entry, *rest = (*ALIASES.get(words[0], (words[0],)), *words[1:])
    try:
        _check_files(entry, rest)
        if entry in TOOLS:
            return _run_tool(entry, rest)
        if entry not in entry_points():
            names = ", ".join([*entry_points(), *TOOLS])
            raise InvalidInputError(f"no entry point is called {entry!r}; the entry points are {names}")
        return _run_with_bar(entry, parse(entry, rest))
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print("interrupted: everything measured so far is kept", file=sys.stderr)  # noqa: T201
        return INTERRUPTED


def _check_files(entry: str, words: list[str]) -> None:
    """Raise InvalidInputError if a setting names a file or folder that does not exist; nothing is imported for it."""
    own = _before_command(words)
    if "-h" in own or "--help" in own:
        return
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    for name in EXISTING:
        parser.add_argument(f"--{name}")
    try:
        given = vars(parser.parse_known_args(own)[0])
    except argparse.ArgumentError:  # a value is missing: parse() says so
        return
    if entry == "export":
        given.setdefault("config", str(BEST_FILE))
    for name, kind in EXISTING.items():
        value = given.get(name, "none")
        if value != "none" and not _exists(Path(value)):
            raise InvalidInputError(
                f"{value} must be a readable {kind} ({os.strerror(errno.ENOENT)}); check the path in {name}"
            )


def _exists(path: Path) -> bool:
    """Whether a path exists, which may begin with the user's folder, or be a pattern of files that do."""
    path = find_file(path.expanduser())
    return path.exists() or ("*" in path.name and any(path.parent.glob(path.name)))


def _before_command(words: list[str]) -> list[str]:
    """Return the words before `--`, which a command with options of its own follows."""
    return words[: words.index("--")] if "--" in words else words


def usage() -> str:
    """Return the list of entry points and tools, each with the question that it answers."""
    found = questions()
    width = max(map(len, [*found, *TOOLS]))
    lists = ["\n".join(f"  {name:{width}}  {text}" for name, text in names.items()) for names in (found, TOOLS)]
    return (
        f"usage: fitproof ENTRY [--setting value ...]\n\nentry points:\n{lists[0]}\n\n"
        f"tools:\n{lists[1]}\n\n"
        "fitproof ENTRY --help lists its settings. A YAML file in ./experiments adds an entry point of its name."
    )


def parse(entry: str, words: list[str]) -> dict[str, Any]:
    """Return the settings given on the command line, as text, group by group.

    Raises:
        InvalidInputError: a setting does not exist, or its value is missing.

    """
    from pipeline.config.settings import nested, unknown_setting

    kind = settings_of(entry)
    if "command" in kind.model_fields:
        own = _before_command(words)
        command = words[len(own) + 1 :]
        own = [part for word in own for part in (("--answer", "json") if word == "--json" else (word,))]
        words = [*own, *(["--command", shlex.join(command)] if command else [])]
    try:
        given, others = _parser(entry, kind, "-h" in words or "--help" in words).parse_known_args(words)
    except argparse.ArgumentError as error:
        name = str(error.argument_name).lstrip("-")
        raise InvalidInputError(f"--{name} needs a value; write --{name} value, see fitproof {entry} --help") from error
    if others and "message" in kind.model_fields and not others[0].startswith("--"):
        given.message = " ".join(takewhile(lambda word: not word.startswith("--"), others))
        others = list(dropwhile(lambda word: not word.startswith("--"), others))
    if others:
        unknown = re.fullmatch(r"--([^=]+)(=.*)?", others[0])
        if unknown is None:
            raise InvalidInputError(f"settings are written as --name value, and {others[0]!r} has no name; add one")
        raise InvalidInputError(unknown_setting(kind, unknown[1]))
    return nested({name: _decoded(kind, name, text) for name, text in vars(given).items()})


def settings_of(entry: str) -> "type[Settings]":
    """Return every setting that an entry point takes: its own and those of a run."""
    from pydantic import create_model

    from pipeline.config.settings import AllSettings

    own = _own_settings(entry)
    return own if entry in TOOLS else create_model("EntrySettings", __base__=(own, AllSettings))


def _own_settings(entry: str) -> "type[Settings]":
    """Return the class of the settings that an entry point adds to those of a run."""
    from pipeline.config.variants import RepeatSettings, SingleSettings

    if entry == "search":
        from pipeline.searching.settings import SearchSettings

        return SearchSettings
    if entry in ("plan", "finetune") or entry in TOOLS:
        own: type[Settings] = getattr(import_module(f"pipeline.jobs.{entry}"), f"{entry.capitalize()}Settings")
        return own
    return SingleSettings if entry in SINGLE else RepeatSettings


def _run_tool(name: str, words: list[str]) -> int:
    """Run the function `name` of jobs/`name`.py."""
    from pipeline.config.settings import validate

    interrupt_on_signal()
    settings = validate(settings_of(name), parse(name, words), name)
    code: int = getattr(import_module(f"pipeline.jobs.{name}"), name)(settings, _console())
    return code


def _run_with_bar(entry: str, given: dict[str, Any]) -> int:
    """Run an entry point that shows how far the tokenization of its corpus is."""
    from pipeline.base.progress import listening
    from pipeline.jobs.progress_bar import ProgressBar

    console = _console()
    with listening(ProgressBar(console)):
        return _run(entry, given, console)


def _run(entry: str, given: dict[str, Any], console: "Console") -> int:
    if entry == "plan":
        from pipeline.jobs.plan import plan

        return plan(given, console)
    if entry == "search":
        from pipeline.jobs.search import search

        return search(given, console)
    if entry == "finetune":
        from pipeline.jobs.finetune import finetune

        return finetune(given, console)
    from pipeline.config.variants import SingleSettings, load_entry_point, load_single
    from pipeline.jobs.comparison import measure

    if entry not in SINGLE:
        return measure(load_entry_point(entry, given), console)
    single = load_single(entry, Path(given.pop("config", SingleSettings.model_fields["config"].default)), given)
    if entry == "main":
        return measure(single, console)
    from pipeline.jobs.profiling import profiling

    return profiling(single, console)


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES, markup=False)


def _parser(entry: str, kind: "type[Settings]", for_help: bool) -> argparse.ArgumentParser:
    """Return the parser of an entry point's settings; descriptions and defaults are filled in for `--help` alone."""
    parser = argparse.ArgumentParser(
        prog=f"fitproof {entry}",
        usage=f"fitproof {entry} [--setting value ...]",
        description={**questions(), **TOOLS}[entry],
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    defaults = _defaults(entry, kind) if for_help else {}
    for title, names in _groups(entry, kind):
        group = parser.add_argument_group(title)
        for name in names:
            field = _field(kind, name)
            text = f"{field.description} (default: {_written(defaults[name])})" if for_help else ""
            flag: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
            group.add_argument(f"--{name}", metavar=_type_name(field.annotation), help=text.replace("%", "%%"), **flag)
    return parser


def _groups(entry: str, kind: "type[Settings]") -> Iterator[tuple[str, list[str]]]:
    """Yield titles with the settings below them: the entry point's own first, those of models and corpora last."""
    from pipeline.config.settings import setting_names

    own = list(setting_names(_own_settings(entry)))
    yield f"settings of {entry}", own
    if entry in TOOLS:
        return
    others = [name for name in setting_names(kind) if name not in own]
    yield "main settings of a run", [name for name in HEADLINE if name in others]
    yield "other settings of a run", [name for name in others if name not in HEADLINE and "." not in name]
    for family in dict.fromkeys(name.partition(".")[0] for name in others if "." in name):
        title = f"{family}: {kind.model_fields[family].description}".rstrip(".")
        yield title, [name for name in others if name.startswith(f"{family}.")]


def _defaults(entry: str, kind: "type[Settings]") -> dict[str, Any]:
    """Return the default of each setting: that of the entry point's YAML, else that of the code."""
    from pipeline.config.settings import setting_names
    from pipeline.config.variants import read_yaml

    defaults = {name: _field(kind, name).default for name in setting_names(kind)}
    if entry in TOOLS or entry in SINGLE:
        return defaults
    own = read_yaml(yaml_file(entry))
    return {**defaults, **own}


def _field(kind: "type[Settings]", name: str) -> Any:
    first, _, rest = name.partition(".")
    field = kind.model_fields[first]
    return _field(field.annotation, rest) if rest else field  # type: ignore[arg-type]


def _written(default: Any) -> str:
    """Return a default as it is written on the command line."""
    from pydantic_core import PydanticUndefined

    from pipeline.config.settings import written

    if default is PydanticUndefined:
        return "none; required"
    return written(default)


def _type_name(annotation: Any) -> str:
    """Return the type of a setting in a word: int, {fp32,bf16}, JSON."""
    arguments = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) is Literal:
        return f"{{{','.join(map(str, arguments))}}}"
    if get_origin(annotation) in (dict, list, tuple):
        return "JSON"
    if get_origin(annotation) is Annotated or arguments:
        return _type_name(arguments[0])
    return annotation.__name__.lower() if inspect.isclass(annotation) else str(annotation)


def _decoded(kind: "type[Settings]", name: str, text: str) -> Any:
    """Return a setting's value as text, or parsed if the setting takes JSON."""
    if _type_name(_field(kind, name).annotation) != "JSON":
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        example = "[32, 64]" if get_origin(_field(kind, name).annotation) is list else '{"precision": ["fp32", "bf16"]}'
        raise InvalidInputError(
            f"{name} must be JSON, and is {text!r} ({error}); write --{name} '{example}'"
        ) from error
