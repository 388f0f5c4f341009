"""The command line: an entry point, and any setting by its dotted name."""

import re
import sys
from pathlib import Path
from typing import Any, cast

from pydantic import create_model
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError
from rich.console import Console

from pipeline.base.contracts import Settings
from pipeline.base.errors import InvalidInputError
from pipeline.config.entry_points import SINGLE, entry_points
from pipeline.config.settings import AllSettings, unknown_setting
from pipeline.config.variants import load_plan, load_single
from pipeline.jobs.plan_settings import PlanSettings
from pipeline.jobs.tools import TOOLS, use
from pipeline.runtime.signals import INTERRUPTED, interrupt_on_signal
from pipeline.searching.settings import SearchSettings

WIDTH_OF_FILES = 120
"""Columns of the tables where no terminal says how wide it is."""


class SingleSettings(Settings):
    """The setting that the entry points of one configuration add."""

    config: Path = Path("experiments/single/fp32.yaml")
    """The YAML file to run: one of experiments/single/, or the config.yaml or best.yaml of an earlier run."""


OWN_SETTINGS: dict[str, type[Settings]] = {
    **dict.fromkeys(SINGLE, SingleSettings),
    "plan": PlanSettings,
    "search": SearchSettings,
}
"""What an entry point takes beside the settings of a run."""


def main(argv: list[str] | None = None) -> int:
    """Run an entry point and return the exit code: 0 done, 1 nothing completed, 2 invalid input, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_usage())  # noqa: T201
            return 0
        entry, *rest = words
        if entry in TOOLS:
            interrupt_on_signal()
            return use(entry, parse(entry, rest), _console())
        if entry not in entry_points():
            names = ", ".join([*entry_points(), *TOOLS])
            raise InvalidInputError(f"no entry point is called {entry!r}; the entry points are {names}")
        return _run(entry, parse(entry, rest))
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept", file=sys.stderr)  # noqa: T201
        return INTERRUPTED


def parse(entry: str, words: list[str]) -> dict[str, Any]:
    """Return the settings given on the command line, as text, group by group.

    Raises:
        InvalidInputError: a setting does not exist, or its value is missing.

    """
    kind = settings_of(entry)
    cli = create_model(
        "Cli",
        __base__=(BaseSettings, kind),
        __cls_kwargs__={
            "cli_avoid_json": True,
            "cli_exit_on_error": False,
            "cli_prog_name": f"python -m pipeline {entry}",
        },
    )
    try:
        return dict(CliSettingsSource(cast(type[BaseSettings], cli), cli_parse_args=words)())
    except SettingsError as error:
        unknown = re.search(r"unrecognized arguments: (.*)", str(error))
        names = re.findall(r"--([^\s=]+)", unknown[1]) if unknown else []
        if names:
            raise InvalidInputError(unknown_setting(kind, names[0])) from error
        message = str(error).removeprefix("error parsing CLI: ")
        raise InvalidInputError(f"{message}; write --name value, see python -m pipeline {entry} --help") from error


def settings_of(entry: str) -> type[Settings]:
    """Return every setting that an entry point takes."""
    if entry in TOOLS:
        return TOOLS[entry]
    own = OWN_SETTINGS.get(entry)
    return AllSettings if own is None else create_model("EntrySettings", __base__=(own, AllSettings))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES, markup=False)


def _run(entry: str, given: dict[str, Any]) -> int:
    console = _console()
    if entry == "plan":
        from pipeline.jobs.plan import make_plan

        return make_plan(given, console)
    if entry == "search":
        from pipeline.jobs.search import search

        return search(given, console)
    from pipeline.jobs.comparison import measure

    if entry not in SINGLE:
        return measure(load_plan(entry, given), console)
    plan = load_single(entry, Path(given.pop("config", SingleSettings.model_fields["config"].default)), given)
    if entry == "main":
        return measure(plan, console)
    from pipeline.jobs.profiling import profiling

    return profiling(plan, console)


def _usage() -> str:
    names = "\n".join(f"  {name}" for name in entry_points())
    return (
        f"usage: python -m pipeline ENTRY [--setting value ...]\n\nentry points:\n{names}\n\n"
        "compare puts runs of MLflow beside each other; report makes a finished job's page anew;\n"
        "handover writes a configuration as files for other frameworks;\n"
        "sync sends the tracking store what earlier jobs could not send.\n"
        "python -m pipeline ENTRY --help lists the settings."
    )
