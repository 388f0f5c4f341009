"""Settings as they are given: their names and values, and the messages for invalid ones; it does not load torch."""

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from pipeline.base.errors import InvalidInputError, close_to, did_you_mean, has_password
from pipeline.base.settings import Settings
from pipeline.config.other_names import names_for

FOLLOWS = {"num_steps": "num_epochs", "learning_rate_warmup_steps": "learning_rate_warmup_ratio"}
"""Settings that follow from another one where that is given: two ways to say the same."""
NUM_CLOSE = 3
"""Names that are shown for one that there is not."""
SettingsClass = TypeVar("SettingsClass", bound=Settings)


def validate(kind: type[SettingsClass], values: Mapping[str, Any], entry: str) -> SettingsClass:
    """Return an instance of `kind` with these values.

    Raises:
        InvalidInputError: a value has a password, or a name is unknown or a value invalid, with a line for each.

    """
    for name, value in dotted(values):
        if isinstance(value, str) and has_password(value):
            raise InvalidInputError(
                f"{name} must not have a password, which others can read in process lists and in MLflow, and "
                f"{value} has one; leave it out of the URL and set PGPASSWORD, or write it to ~/.pgpass; replace a "
                "password that has been on a command line"
            )
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise InvalidInputError("\n".join(_explain(kind, detail, entry) for detail in error.errors())) from error


def split_off(kind: type[SettingsClass], values: Mapping[str, Any], entry: str) -> tuple[SettingsClass, dict[str, Any]]:
    """Return an instance of `kind` with those of these values that it has, and the others.

    Raises:
        InvalidInputError: as validate().

    """
    own = {name: value for name, value in values.items() if name in kind.model_fields}
    return validate(kind, own, entry), {name: value for name, value in values.items() if name not in own}


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("causal_lm.num_layers", 4) for {"causal_lm": {"num_layers": 4}}."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"causal_lm": {"num_layers": 4}} for {"causal_lm.num_layers": 4}."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        first, _, rest = name.partition(".")
        result = _updated(result, {first: nested({rest: value}) if rest else value})
    return result


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `changes`, recursively; of two ways to say the same, that of `changes` counts."""
    replaced = {name for pair in FOLLOWS.items() if not changes.keys().isdisjoint(pair) for name in pair}
    replaced -= changes.keys()
    return _updated({name: value for name, value in base.items() if name not in replaced}, changes)


def _updated(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = _updated(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def written(value: object) -> str:
    """Return a setting's value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def yaml_text(values: Mapping[str, Any]) -> str:
    """Return settings as the text of a YAML file, in their order."""
    return yaml.safe_dump(dict(values), sort_keys=False)


def unknown_setting(kind: type[Settings], name: str) -> str:
    """Return the message for an unknown setting: what it is called here, or the closest names."""
    names = list(setting_names(kind))
    meant = [one for one in names_for(name) if one.partition("=")[0] in names]
    meant = meant or close_to(name.replace("-", "_"), names, NUM_CLOSE)
    return f"no setting is called {name}; {did_you_mean(meant, '--help-all lists all settings')}"


def setting_names(kind: type[Settings], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every setting of `kind`."""
    for name, field in kind.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, Settings):
            yield from setting_names(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _explain(kind: type[Settings], detail: Mapping[str, Any], entry: str) -> str:
    """Return a line for one of pydantic's errors: rule, value, remedy."""
    known = set(setting_names(kind))
    path = [str(part) for part in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        return unknown_setting(kind, ".".join(path))
    name = next((n for n in (".".join(path[:end]) for end in range(1, len(path) + 1)) if n in known), ".".join(path))
    remedy = f"fitproof {entry} --help explains it"
    if detail["type"] == "missing":
        return f"{name} must be given, and is missing; {remedy}"
    rule = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{name} {rule[0].lower() + rule[1:]}, and is {detail['input']!r}; {remedy}"
