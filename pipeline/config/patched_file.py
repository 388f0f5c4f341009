"""A YAML, JSON or TOML file whose keys are dimensions of a search: each run reads a copy with other values."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.base.errors import InvalidInputError, close_to
from pipeline.config.given import dotted
from pipeline.config.space import Value

YAML = (".yaml", ".yml")
FORMATS = (*YAML, ".json", ".toml")
TABLE = re.compile(r"\s*\[(?P<name>[^\[\]]+|\[[^\[\]]+\])\]\s*(#.*)?")
"""The line of a table of TOML, whose name has brackets if it is one of several."""


@dataclass(frozen=True)
class PatchedFile:
    """A file of the user's, which is never written."""

    path: str
    """As the command names it."""
    text: str

    @property
    def values(self) -> dict[str, Any]:
        """The value of each key that is no group of others, by its dotted name.

        Raises:
            InvalidInputError: the file is not what its name says.

        """
        try:
            content = _read(self.path, self.text)
        except (yaml.YAMLError, ValueError) as error:  # tomllib's and json's errors are ValueErrors
            raise InvalidInputError(f"{self.path} cannot be read ({error}); correct it") from error
        return dict(dotted(content)) if isinstance(content, dict) else {}

    def with_values(self, changes: Mapping[str, Value]) -> str:
        """Return its text with other values of some of its keys.

        Raises:
            InvalidInputError: a value of TOML does not stand in one line behind its key.

        """
        if self.path.endswith(".toml"):
            return _patched_toml(self.text, changes)
        content = _read(self.path, self.text)
        for key, value in changes.items():
            _set(content, key, value)
        if self.path.endswith(".json"):
            return json.dumps(content, indent=2) + "\n"
        return yaml.safe_dump(content, sort_keys=False)

    def check(self, key: str) -> None:
        """Raise InvalidInputError, with the names that are close, if it has no such key."""
        known = list(self.values)
        if key not in known:
            close = close_to(key, known, most=3, likeness=0.4) or known
            raise InvalidInputError(
                f"a patch changes keys that the file has, and {self.path} has no {key}; close are {', '.join(close)}"
            )


def read_patched_file(path: str) -> PatchedFile:
    """Return a file that is to be patched.

    Raises:
        InvalidInputError: it cannot be read, or its name does not say its format.

    """
    if not path.endswith(FORMATS):
        raise InvalidInputError(f"a patched file ends in {', '.join(FORMATS)}, and {path} does not; rename it")
    try:
        return PatchedFile(path, Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInputError(f"{path} must be a readable file ({reason}); check its path") from error


def _read(path: str, text: str) -> Any:
    if path.endswith(".toml"):
        return tomllib.loads(text)
    return json.loads(text) if path.endswith(".json") else _apart(yaml.safe_load(text) or {})


def _apart(content: Any) -> Any:
    """Return content of YAML in which no part is also another, as aliases make it."""
    if isinstance(content, dict):
        return {name: _apart(part) for name, part in content.items()}
    return [_apart(part) for part in content] if isinstance(content, list) else content


def _set(content: dict[Any, Any], key: str, value: Value) -> bool:
    """Set the value of a key by its dotted name, whose parts may have dots too; return whether it is there."""
    for name, inner in content.items():
        if str(name) == key:
            content[name] = value
            return True
        if isinstance(inner, dict) and key.startswith(f"{name}.") and _set(inner, key[len(f"{name}.") :], value):
            return True
    return False


def _patched_toml(text: str, changes: Mapping[str, Value]) -> str:
    """Return TOML with other values; all other lines stay, comments too.

    Raises:
        InvalidInputError: a key is written in a way that is not known here, such as over several lines.

    """
    lines, table = [], ""
    for line in text.splitlines():
        if header := TABLE.fullmatch(line):
            table = f"{header['name'].strip()}."
        name, equals, _ = line.partition("=")
        key = f"{table}{name.strip()}"
        lines.append(f"{name}{equals} {json.dumps(changes[key])}" if equals and key in changes else line)
    patched, wanted = "\n".join(lines) + "\n", tomllib.loads(text)
    for key, value in changes.items():
        _set(wanted, key, value)
    try:
        found = tomllib.loads(patched)
    except tomllib.TOMLDecodeError:
        found = {}
    if repr(found) != repr(wanted):  # nan is not equal to itself
        raise InvalidInputError(
            f"the value of each patched key must stand in one line behind it, and one of {', '.join(changes)} or a "
            "line of text that looks like it does not; write it so"
        )
    return patched
