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
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import version
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args, get_origin

from pipeline.base.errors import InvalidInputError, close_to, did_you_mean
from pipeline.base.machines import check_started_by_torchrun
from pipeline.config.entry_points import (
    BEST_FILE,
    EXAMPLES,
    EXISTING,
    SINGLE,
    SPACES,
    TOOLS,
    USED,
    USED_OF_COMPARISONS,
    entry_points,
    find_file,
    questions,
    value_of,
    yaml_file,
)
from pipeline.runtime.signals import INTERRUPTED, interrupt_on_signal
from pipeline.tracking.run_of_job import keep_run_of_job

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.base.settings import Settings

OWN_JOBS = (*SPACES, "profiling")
"""Entry points with a job of their own; all others are comparisons."""
WIDTH_OF_FILES = 100
"""Columns of the tables where the output is no terminal."""
HELP, HELP_ALL, VERSION = ("-h", "--help"), "--help-all", "--version"
"""Words that ask for the settings that most people set, for all, and for Fitproof's version."""


def main(argv: list[str] | None = None) -> int:
    """Run an entry point and return the exit code: 0 done, 1 nothing completed, 2 invalid input, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    keep_run_of_job()
    if not words or words[0] in (*HELP, HELP_ALL, "help"):
        print(usage())  # noqa: T201
        return 0
    if words[0] == VERSION:
        print(f"fitproof {version('fitproof')}")  # noqa: T201
        return 0
    entry, *rest = words
    try:
        _check_files(entry, rest)
        if entry in TOOLS:
            return _run_tool(entry, rest)
        if entry not in entry_points():
            names = [*entry_points(), *TOOLS]
            hint = did_you_mean(close_to(entry, names), f"the entry points are {', '.join(names)}")
            raise InvalidInputError(f"no entry point is called {entry!r}; {hint}")
        return _run_entry_point(entry, rest)
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print(f"interrupted{_what_is_kept(entry)}", file=sys.stderr)  # noqa: T201
        return INTERRUPTED


def _check_files(entry: str, words: list[str]) -> None:
    """Raise InvalidInputError if a setting names a file or folder that does not exist; nothing is imported for it."""
    own = _before_command(words)
    if asks_for_help(own):
        return
    for name, kind in EXISTING.items():
        value = value_of(name, own)
        if value is None and (entry, name) == ("export", "config"):
            value = str(BEST_FILE)
        if value not in (None, "", "none") and not _exists(Path(value)):
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


def asks_for_help(words: list[str]) -> bool:
    """Return whether these words ask for the settings of an entry point; those of a command after `--` do not."""
    return not {*HELP, HELP_ALL}.isdisjoint(_before_command(words))


def usage() -> str:
    """Return the list of entry points and tools, each with the question that it answers."""
    found = questions()
    width = max(map(len, [*found, *TOOLS]))
    lists = ["\n".join(f"  {name:{width}}  {text}" for name, text in names.items()) for names in (found, TOOLS)]
    return (
        f"usage: fitproof ENTRY [--setting value ...]\n\nentry points:\n{lists[0]}\n\n"
        f"tools:\n{lists[1]}\n\n"
        "fitproof ENTRY --help shows what most people set, --help-all every setting. A YAML file in ./experiments "
        "adds an entry point of its name."
    )


def parse(entry: str, words: list[str]) -> dict[str, Any]:
    """Return the settings given on the command line, as text, group by group.

    Raises:
        InvalidInputError: a setting does not exist, or its value is missing.

    """
    from pipeline.config.given import nested, unknown_setting

    kind = settings_of(entry)
    if "command" in kind.model_fields:
        own = _before_command(words)
        command = words[len(own) + 1 :]
        if not command and own != words:
            raise InvalidInputError("a command follows --, and there is none; write it there as in a shell")
        if "answer" in kind.model_fields:
            own = [part for word in own for part in (("--answer", "json") if word == "--json" else (word,))]
        words = [*own, *(["--command", shlex.join(command)] if command else [])]
    try:
        if asks_for_help(words):
            _print_help(entry, kind, words)
        given, others = _parser(entry, kind).parse_known_args(words)
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
        names = [found[1] for word in others if (found := re.fullmatch(r"--([^=]+)(=.*)?", word))]
        raise InvalidInputError("\n".join(unknown_setting(kind, name) for name in names))
    return nested({name: _decoded(kind, name, text) for name, text in vars(given).items()})


def settings_of(entry: str) -> "type[Settings]":
    """Return every setting that an entry point takes: its own and those of a run."""
    own = _own_settings(entry)
    if entry in TOOLS:
        return own
    from pydantic import create_model

    from pipeline.config.settings import AllSettings

    return create_model("EntrySettings", __base__=(own, AllSettings))


def _own_settings(entry: str) -> "type[Settings]":
    """Return the class of the settings that an entry point adds to those of a run."""
    if entry == "search":
        from pipeline.searching.settings import SearchEntrySettings

        return SearchEntrySettings
    if entry in SPACES or entry in TOOLS:
        own: type[Settings] = getattr(import_module(f"pipeline.jobs.{entry}"), f"{entry.capitalize()}Settings")
        return own
    from pipeline.config.variants import RepeatSettings, single_settings

    return single_settings(entry) if entry in SINGLE else RepeatSettings


def _run_tool(name: str, words: list[str]) -> int:
    """Run the function `name` of jobs/`name`.py; it says what it does before imports that take seconds."""
    interrupt_on_signal()
    if not asks_for_help(words):
        print(f"fitproof {name}: {TOOLS[name]}", file=sys.stderr, flush=True)  # noqa: T201  stdout is the answer's
    from pipeline.config.given import validate

    settings = validate(settings_of(name), parse(name, words), name)
    code: int = getattr(import_module(f"pipeline.jobs.{name}"), name)(settings, _console())
    return code


def _what_is_kept(entry: str) -> str:
    """Return what Ctrl-C leaves, and how to go on."""
    if entry == "plan":
        return ": the predictions so far are kept, and the same command begins with them"
    if entry in TOOLS and entry != "worker":
        return ""
    goes_on = "; the same command goes on from there" if entry in ("search", "worker") else ""
    if entry == "finetune":
        goes_on = "; the same command compares the kinds again, and its search goes on from there"
    return f": everything measured so far is kept{goes_on}"


def _run_entry_point(entry: str, words: list[str]) -> int:
    """Run an entry point; it says at once what it does, and how far it is whenever that takes long."""
    if asks_for_help(words):
        parse(entry, words)
    from pipeline.base.progress import listening, progress
    from pipeline.jobs.progress_bar import ProgressBar

    check_started_by_torchrun(entry)
    console = _console()
    console.print(f"fitproof {entry}: {questions()[entry]}", style="dim", highlight=False, soft_wrap=True)
    with listening(ProgressBar(console)):
        with progress("loading PyTorch"):
            given = parse(entry, words)
            job = import_module(f"pipeline.jobs.{entry if entry in OWN_JOBS else 'comparison'}")
        interrupt_on_signal()
        if entry in OWN_JOBS:
            code: int = getattr(job, entry)(given, console)
            return code
        from pipeline.config.variants import load_entry_point, load_single
        from pipeline.jobs.comparison import measure

        return measure(load_single(entry, given) if entry == "main" else load_entry_point(entry, given), console)


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES, markup=False)


def _print_help(entry: str, kind: "type[Settings]", words: list[str]) -> NoReturn:
    """Print the settings that most people set, and those that belong to what was chosen; or all; and exit."""
    from pipeline.config.given import setting_names

    every = list(_groups(entry, kind))
    if entry in TOOLS or HELP_ALL in words:
        groups, more = every, ""
    else:
        own = [word for word in words if word not in HELP]
        chosen = vars(_parser(entry, kind).parse_known_args(own)[0])
        used = USED["main"] if entry in SINGLE else USED.get(entry, USED_OF_COMPARISONS)
        own_used = [name for name in used if name.partition(".")[0] in kind.model_fields]  # profiling saves nothing
        groups = [("settings that most people set", own_used), *_settings_of_chosen(chosen, every)]
        more = f"\n\nfitproof {entry} {HELP_ALL} lists all {len(list(setting_names(kind)))} settings."
    example = f"\n\nexample: {EXAMPLES[entry]}" if entry in EXAMPLES else ""
    _parser(entry, kind, groups, _defaults(entry, kind), example + more).print_help()
    raise SystemExit(0)


def _settings_of_chosen(chosen: dict[str, str], groups: list[tuple[str, list[str]]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the settings of the model family and the corpus that are chosen, and those named after a chosen value."""
    from pipeline.config.experiment import corpus_of, family_of

    families = {
        *([family_of(chosen["model"], chosen.get("task"))] if chosen.get("model", "auto") != "auto" else []),
        *([corpus_of(chosen["corpus"])] if "corpus" in chosen else []),
    }
    yield from ((title, names) for title, names in groups if title.partition(":")[0] in families)
    for setting, value in chosen.items():
        begins = (f"{setting}_", f"{value}_")
        if names := [name for _, all_of in groups for name in all_of if name.startswith(begins) and name not in chosen]:
            yield f"{setting}={value}", names


def _parser(
    entry: str,
    kind: "type[Settings]",
    groups: Iterable[tuple[str, list[str]]] | None = None,
    defaults: dict[str, Any] | None = None,
    more: str = "",
) -> argparse.ArgumentParser:
    """Return the parser of an entry point's settings; for a help text with descriptions, defaults and `more`."""
    parser = argparse.ArgumentParser(
        prog=f"fitproof {entry}",
        usage=f"fitproof {entry} [--setting value ...]",
        description={**questions(), **TOOLS}[entry] + more,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title, names in _groups(entry, kind) if groups is None else groups:
        group = parser.add_argument_group(title)
        for name in names:
            field = _field(kind, name)
            text = "" if defaults is None else f"{field.description} (default: {_written(defaults[name])})"
            is_flag = bool in (field.annotation, *get_args(field.annotation))
            flag: dict[str, Any] = {"nargs": "?", "const": "true"} if is_flag else {}
            group.add_argument(f"--{name}", metavar=_type_name(field.annotation), help=text.replace("%", "%%"), **flag)
    return parser


def described(entry: str) -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
    """Yield titles with the settings below them, each with name, type, default and description (docs/reference.md)."""
    kind = settings_of(entry)
    defaults = _defaults(entry, kind)
    for title, names in _groups(entry, kind):
        fields = {name: _field(kind, name) for name in names}
        yield (
            title,
            [
                (name, _type_name(field.annotation), _written(defaults[name]), str(field.description))
                for name, field in fields.items()
            ],
        )


def _groups(entry: str, kind: "type[Settings]") -> Iterator[tuple[str, list[str]]]:
    """Yield titles with the settings below them: the entry point's own first, those of models and corpora last."""
    from pipeline.config.given import setting_names

    own = list(setting_names(_own_settings(entry)))
    yield f"settings of {entry}", own
    if entry in TOOLS:
        return
    others = [name for name in setting_names(kind) if name not in own]
    yield "settings of a run", [name for name in others if "." not in name]
    for family in dict.fromkeys(name.partition(".")[0] for name in others if "." in name):
        title = f"{family}: {kind.model_fields[family].description}".rstrip(".")
        yield title, [name for name in others if name.startswith(f"{family}.")]


def _defaults(entry: str, kind: "type[Settings]") -> dict[str, Any]:
    """Return the default of each setting: that of the entry point's YAML, else that of the code."""
    from pipeline.config.given import setting_names
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
    from pydantic_core import PydanticUndefined

    from pipeline.config.given import written

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
    if get_origin(annotation) is Annotated:
        return _type_name(arguments[0])
    if arguments:
        return " or ".join(dict.fromkeys(map(_type_name, arguments)))
    return annotation.__name__.lower() if inspect.isclass(annotation) else str(annotation)


def _decoded(kind: "type[Settings]", name: str, text: str) -> Any:
    """Return a setting's value as text, or parsed if the setting takes JSON."""
    if _type_name(_field(kind, name).annotation) != "JSON":
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        described = re.search(r"\[.*?\]|\{.*?\}", str(_field(kind, name).description))
        example = described[0] if described else '{"precision": ["fp32", "bf16"]}'
        raise InvalidInputError(
            f"{name} must be JSON, and is {text!r} ({error}); write --{name} '{example}'"
        ) from error
