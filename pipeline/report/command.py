"""The command that runs a configuration again, with another entry point or other settings."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from pipeline.config.settings import default_values

DERIVED = {"accumulation_steps", "output"}
"""Settings that follow from others, or that say nothing of a run."""


def command_of(entry: str, params: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> str:
    """Return the command that runs `entry` with the settings of a run and `changes`; defaults are left out."""
    settings, defaults = {**params, **(changes or {})}, default_values()
    words = ["headroom", entry]
    for name, value in settings.items():
        if name in defaults and name not in DERIVED and _written(value) != _written(defaults[name]):
            words += [f"--{name}", _written(value)]
    return shlex.join(words)


def _written(value: object) -> str:
    """Return a value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return json.dumps(value) if isinstance(value, list | dict) else str(value)
