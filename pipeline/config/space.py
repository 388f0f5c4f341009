"""The configurations to choose from: every combination of the dimensions' values."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from pipeline.base.contracts import Hardware, Settings
from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import check_setting_name
from pipeline.config.settings import TECHNIQUES, AllSettings, RunSettings, dotted, validate

Value = str | int | float | bool | None
"""What a dimension may be set to; YAML and the setting's own type decide which."""
Choice = dict[str, Value]
"""One configuration: a value for each dimension, by its setting's dotted name."""


class SpaceSettings(Settings):
    """What there is to choose from."""

    space: dict[str, list[Value] | Literal["divisors", "auto"]] = Field(default={}, min_length=1, validate_default=True)
    """Any setting by its dotted name and the values to try; divisors: of effective_batch_size; auto: by the device."""


NOT_PASSED_ON = object()
"""Stands for the default of a setting that MLproject never passes on."""


@dataclass(frozen=True)
class Space:
    """Dimensions by name, each with its values."""

    dimensions: Mapping[str, tuple[Value, ...]]
    excluded: tuple[Choice, ...] = ()
    """Combinations of these values that are no configurations."""

    @property
    def choices(self) -> list[Choice]:
        """Every configuration."""
        names = list(self.dimensions)
        combinations = (
            dict(zip(names, values, strict=True)) for values in itertools.product(*self.dimensions.values())
        )
        return [choice for choice in combinations if choice not in self.excluded]

    def without(self, unsupported: Callable[[Choice], str | None]) -> tuple["Space", tuple[str, ...]]:
        """Return the space without the configurations for which there is a reason, and each of these reasons once.

        Raises:
            InvalidInputError: no configuration is left.

        """
        reasons = [(choice, unsupported(choice)) for choice in self.choices]
        supported = [choice for choice, reason in reasons if reason is None]
        found = tuple(dict.fromkeys(reason for _, reason in reasons if reason is not None))
        if not supported:
            raise InvalidInputError(f"{'; '.join(found)}; no configuration is left, so give the space other values")
        dimensions = {
            name: tuple(value for value in values if any(choice[name] == value for choice in supported))
            for name, values in self.dimensions.items()
        }
        excluded = [choice for choice in Space(dimensions).choices if choice not in supported] if found else []
        return Space(dimensions, tuple(excluded)), found


def read_space(
    own: SpaceSettings, values: Mapping[str, Any], given: Mapping[str, Any], entry: str, hardware: Hardware
) -> tuple[RunSettings, Space]:
    """Return the settings that all configurations share, and what there is to choose from.

    `values` has the entry point's YAML and the user's overrides, `given` the overrides alone. `hardware` decides the
    values of a dimension that is `auto`.

    Raises:
        InvalidInputError: a setting or a dimension is wrong, or effective_batch_size is missing.

    """
    if given.get("space") == {}:
        raise InvalidInputError(f"a {entry} needs at least one dimension, and space is empty; name one with its values")
    shared = validate(AllSettings, values, entry)
    effective = shared.effective_batch_size  # type: ignore[attr-defined]
    if effective is None:
        raise InvalidInputError(f"a {entry} needs effective_batch_size, which must hold in every configuration; set it")
    typed = dict(dotted(shared.model_dump()))
    return shared, make_space(own, effective, _pinned(own, typed, given), hardware)


def _pinned(settings: SpaceSettings, typed: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Value]:
    """Return the dimensions that the user has set to one value; defaults of run settings come from MLproject too."""
    default = RunSettings()
    return {
        name: typed[name]
        for name, _ in dotted(given)
        if name in settings.space and typed[name] != getattr(default, name, NOT_PASSED_ON)
    }


def make_space(
    settings: SpaceSettings, effective_batch_size: int, pinned: Mapping[str, Value], hardware: Hardware
) -> Space:
    """Return the space; a dimension that the user has set to one value keeps that value alone.

    Raises:
        InvalidInputError: a dimension is no setting, has no value, or cannot be `divisors` or `auto`.

    """
    divisors = tuple(n for n in range(1, effective_batch_size + 1) if effective_batch_size % n == 0)
    dimensions: dict[str, tuple[Value, ...]] = {}
    for name, values in settings.space.items():
        check_setting_name(name)
        if name in type(settings).model_fields:
            raise InvalidInputError(
                f"all configurations share one {name}, so it cannot be a dimension; take space.{name} out"
            )
        if values == "divisors" and name != "micro_batch_size":
            raise InvalidInputError(
                f"only micro_batch_size takes `divisors`, and space.{name} is set to it; list its values"
            )
        if name in pinned:
            dimensions[name] = (pinned[name],)
        elif values == "auto":
            dimensions[name] = _values_to_try(name, hardware)
        else:
            dimensions[name] = divisors if values == "divisors" else tuple(values)
        if not dimensions[name]:
            raise InvalidInputError(
                f"a dimension needs at least one value, and space.{name} has none; list some or remove it"
            )
    return Space(dimensions)


def _values_to_try(name: str, hardware: Hardware) -> tuple[Value, ...]:
    """Return what the technique with the setting `name` tries on `hardware`."""
    technique = next((one for one in TECHNIQUES.values() if name in one.model_fields), None)
    values = technique.values_to_try(name, hardware) if technique else ()
    if not values:
        raise InvalidInputError(
            f"only a technique's setting with a fixed list of values takes `auto`, and space.{name} is set to it; "
            "list its values"
        )
    return values
