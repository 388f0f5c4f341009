"""The command that runs a configuration again, with another entry point or other settings."""

import shlex
from collections.abc import Mapping
from typing import Any

from pipeline.config.given import written
from pipeline.config.settings import default_values

DERIVED = {"accumulation_steps", "output"}
"""Settings that follow from others, or that say nothing of a run."""


def command_of(entry: str, params: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> str:
    """Return the command that runs `entry` with the settings of a run and `changes`; defaults are left out."""
    settings, defaults = {**params, **(changes or {})}, default_values()
    changed = {
        name: value
        for name, value in settings.items()
        if name in defaults and name not in DERIVED and written(value) != written(defaults[name])
    }
    return command_line(entry, changed)


def command_line(entry: str, settings: Mapping[str, Any]) -> str:
    """Return the command that runs `entry` with these settings."""
    named = {name: value for name, value in settings.items() if name != "command"}
    words = [word for name, value in named.items() for word in (f"--{name}", written(value))]
    searched = ["--", *shlex.split(str(settings["command"]))] if "command" in settings else []
    return shlex.join(["fitproof", entry, *words, *searched])


def command_on_machines(command: str, num_machines: int) -> str:
    """Return what is started on each of so many machines; on one it is the command itself."""
    if num_machines == 1:
        return command
    return f"torchrun --nnodes {num_machines} --rdzv-backend c10d --rdzv-endpoint HOST:29400 --no-python {command}"
