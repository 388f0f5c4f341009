"""A space of configurations: every combination of the values of its dimensions."""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.settings import Settings
from pipeline.base.technique import Mathematics
from pipeline.base.units import divisors
from pipeline.config.entry_points import yaml_file
from pipeline.config.given import dotted, merged, nested, setting_names, unknown_setting, validate
from pipeline.config.settings import TECHNIQUES, AllSettings, RunSettings
from pipeline.config.variants import read_config, read_yaml

Value = str | int | float | bool | None
"""A value of a dimension, as YAML and the type of its setting read it."""
Choice = dict[str, Value]
"""One configuration: a value for each dimension, by its setting's dotted name."""
Refusals = Mapping[str, int]
"""Why configurations are not in a space, and how many for each reason, the most frequent first."""

MICRO_BATCH = "micro_batch_size"
FOLLOWING = ("accumulation_steps",)
"""Settings in a file of one configuration that follow from others, which may vary in a space."""
NUM_REASONS = 12
"""Reasons that are written out."""
NUM_REASONS_IN_ERROR = 3
"""The same in the message that no configuration is left."""


class SpaceSettings(Settings):
    """The settings of a space."""

    space: dict[str, list[Value] | Literal["divisors", "auto"]] = Field(default={}, min_length=1, validate_default=True)
    """Values to try of each setting, by dotted name; divisors: of effective_batch_size; auto: chosen for the device."""
    mathematics: Mathematics = Mathematics.ROUNDING
    """How far values of the space may change the training: exact, rounding (other round-off as well) or different."""
    config: Path | None = None
    """A YAML file of settings that all configurations share, such as best.yaml; dimensions of the space still vary."""


@dataclass(frozen=True)
class Space:
    """Dimensions by name, each with its values."""

    dimensions: Mapping[str, tuple[Value, ...]]
    kept: tuple[Choice, ...] | None = None
    """The combinations of these values that are its configurations; None: all."""

    @cached_property
    def choices(self) -> list[Choice]:
        """Every configuration."""
        if self.kept is not None:
            return [*self.kept]
        combinations = itertools.product(*self.dimensions.values())
        return [dict(zip(self.dimensions, values, strict=True)) for values in combinations]

    def with_values(self, values: Choice) -> list[Choice]:
        """Return the configurations that have these values, the largest micro-batch first."""
        return sorted((one for one in self.choices if values.items() <= one.items()), key=size_of, reverse=True)

    def plain_values(self, defaults: Mapping[str, Any]) -> Choice:
        """Return the default of each dimension but the micro-batch size, or its first value if that is not there."""
        return {
            name: defaults[name] if name in defaults and defaults[name] in values else values[0]
            for name, values in self.dimensions.items()
            if name != MICRO_BATCH
        }

    def without(self, refused: Callable[[Choice], str | None]) -> tuple["Space", Refusals]:
        """Return the space without the refused configurations, and how many were refused for each reason.

        Raises:
            InvalidInputError: no configuration is left.

        """
        reasons = [(choice, refused(choice)) for choice in self.choices]
        supported = [choice for choice, reason in reasons if reason is None]
        found = dict(Counter(reason for _, reason in reasons if reason is not None).most_common())
        if not supported:
            raise InvalidInputError(nothing_left(found))
        left = {name: {choice[name] for choice in supported} for name in self.dimensions}
        dimensions = {
            name: tuple(value for value in values if value in left[name]) for name, values in self.dimensions.items()
        }
        return Space(dimensions, tuple(supported)), found


def size_of(choice: Choice) -> int:
    """Return the micro-batch size of a configuration; 0 if it is no dimension."""
    return int(str(choice.get(MICRO_BATCH, 0)))


def key_of(choice: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return what is equal for equal configurations, whatever the order of their dimensions."""
    return tuple(sorted(choice.items(), key=lambda pair: pair[0]))


def without_size(choice: Choice) -> tuple[tuple[str, Value], ...]:
    """Return what is equal for configurations that differ in their micro-batch alone."""
    return tuple(item for item in choice.items() if item[0] != MICRO_BATCH)


def why_not_included(limit: Mathematics, values: str, its: Mathematics) -> str | None:
    """Return why values that change the training so far are not in a space with this limit, or None if they are."""
    if limit.includes(its):
        return None
    rule = f"mathematics is {limit} at most in this space, and that of {values} is {its}"
    return f"{rule}; set mathematics={its} to allow it"


def nothing_left(reasons: Collection[str]) -> str:
    """Return the message for a space whose configurations are all refused; the most frequent reason comes first."""
    shown = [*itertools.islice(reasons, NUM_REASONS_IN_ERROR)]
    if len(reasons) > len(shown):
        shown.append(f"{len(reasons) - len(shown)} further reasons")
    return f"{'; '.join(shown)}; no configuration is left; give the space other values"


def sentences(refusals: Refusals) -> tuple[str, ...]:
    """Return a sentence for each reason, with its number of configurations; the rarest reasons share one."""
    shown = [f"left out of the space: {_counted(count)}: {reason}" for reason, count in refusals.items()]
    if len(shown) <= NUM_REASONS:
        return tuple(shown)
    others = list(refusals.values())[NUM_REASONS - 1 :]
    return (
        *shown[: NUM_REASONS - 1],
        f"left out of the space: {_counted(sum(others))} for {len(others)} further reasons",
    )


def _counted(count: int) -> str:
    return f"{count:,} configuration{'s' if count > 1 else ''}"


def space_values(entry: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an entry point's YAML, with those of the user's file `config` and then the user's own.

    A space that the user gives replaces the default one.

    Raises:
        InvalidInputError: a file cannot be read, or `config` is of another tool.

    """
    own = {name: value for name, value in given.items() if name != "config"}
    config = given.get("config")
    file = {} if config in (None, "none") else read_config(Path(str(config)))
    shared = nested({k: v for k, v in file.items() if k not in FOLLOWING and (k, v) != ("budget", None)})
    values = read_yaml(yaml_file(entry))
    for replaced, by in ((values, {**shared, **own}), (shared, own)):
        if "space" in by:
            replaced.pop("space", None)
    return merged(merged(nested(values), shared), own)


def read_space(
    own: SpaceSettings, values: Mapping[str, Any], given: Mapping[str, Any], entry: str, hardware: Hardware
) -> tuple[RunSettings, Space]:
    """Return the settings that all configurations share, and the space.

    `values` are those of the entry point's YAML with the user's overrides, `given` the overrides alone.
    `hardware` decides the values of a dimension that is `auto`.

    Raises:
        InvalidInputError: a setting or a dimension is wrong, or effective_batch_size is missing.

    """
    if given.get("space") == {}:
        raise InvalidInputError(f"a {entry} needs at least one dimension, and space is empty; name one with its values")
    shared = validate(AllSettings, values, entry)
    effective = shared.effective_batch_size  # type: ignore[attr-defined]
    if effective is None:
        raise InvalidInputError(f"a {entry} needs effective_batch_size, which all configurations share; set it")
    typed = dict(dotted(shared.model_dump()))
    pinned = {name: typed[name] for name, _ in dotted(given) if name in own.space}
    return shared, make_space(own, effective, pinned, hardware)


def make_space(
    settings: SpaceSettings, effective_batch_size: int, pinned: Mapping[str, Value], hardware: Hardware
) -> Space:
    """Return the space; a dimension in `pinned` has that value alone.

    Raises:
        InvalidInputError: a dimension is not a setting, has no value, or cannot be `divisors` or `auto`.

    """
    dimensions: dict[str, tuple[Value, ...]] = {}
    for name, values in settings.space.items():
        if name not in set(setting_names(AllSettings)):
            raise InvalidInputError(unknown_setting(AllSettings, name))
        if name in type(settings).model_fields:
            raise InvalidInputError(
                f"all configurations share one {name}, so it cannot be a dimension; remove space.{name}"
            )
        if values == "divisors" and name != MICRO_BATCH:
            raise InvalidInputError(
                f"only micro_batch_size takes `divisors`, and space.{name} is set to it; list its values"
            )
        if name in pinned:
            dimensions[name] = (pinned[name],)
        elif values == "auto":
            dimensions[name] = _values_to_try(name, hardware)
        else:
            dimensions[name] = divisors(effective_batch_size) if values == "divisors" else tuple(dict.fromkeys(values))
        if not dimensions[name]:
            raise InvalidInputError(
                f"a dimension needs at least one value, and space.{name} has none; list some or remove it"
            )
    return Space(dimensions)


def _values_to_try(name: str, hardware: Hardware) -> tuple[Value, ...]:
    """Return the values that the technique with the setting `name` tries on `hardware`."""
    technique = next((one for one in TECHNIQUES.values() if name in one.model_fields), None)
    values = technique.values_to_try(name, hardware) if technique else ()
    if not values:
        raise InvalidInputError(
            f"only a technique's setting with a fixed list of values takes `auto`, and space.{name} is set to it; "
            "list its values"
        )
    return values
