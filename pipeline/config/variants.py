"""YAML and overrides -> the variants that an entry point compares, all checked before the first one runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import model_validator

from pipeline.base.contracts import Settings
from pipeline.base.errors import InvalidInputError
from pipeline.config.entry_points import FOLDER
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.settings import AllSettings, dotted, merged, nested, validate


@dataclass(frozen=True)
class Variant:
    """One way of doing it, among those that an entry point compares."""

    name: str
    experiment: Experiment
    skipped: str | None
    """Why this machine cannot run it, if it cannot."""


@dataclass(frozen=True)
class Comparison:
    """Variants beside each other, one of them the baseline."""

    name: str
    baseline: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class Plan:
    """What an entry point runs."""

    entry: str
    question: str
    comparisons: tuple[Comparison, ...]

    @property
    def variants(self) -> Iterator[Variant]:
        """Every variant of every comparison."""
        return (variant for comparison in self.comparisons for variant in comparison.variants)


class ComparisonSettings(Settings):
    """One comparison in an entry point's YAML."""

    baseline: str
    """The variant that the others are compared with."""
    variants: dict[str, dict[str, Any]]
    """By name, what each variant sets."""

    @model_validator(mode="after")
    def _baseline_is_a_variant(self) -> Self:
        if self.baseline not in self.variants:
            raise ValueError(f"must name one of its variants ({', '.join(self.variants)}) as its baseline")
        return self


class PlanSettings(Settings):
    """What an entry point's YAML says beside settings."""

    question: str
    """What the entry point answers."""
    comparisons: dict[str, ComparisonSettings]
    """By name, the variants to run."""


def load_plan(entry: str, overrides: Mapping[str, Any]) -> Plan:
    """Return the plan of experiments/`entry`.yaml with the user's overrides, all of its variants checked.

    Raises:
        InvalidInputError: as make_experiment, or an override has no effect because every variant sets it.

    """
    values = read_yaml(FOLDER / f"{entry}.yaml")
    plan = validate(
        PlanSettings, {name: values.pop(name) for name in PlanSettings.model_fields if name in values}, entry
    )
    base = merged(nested(values), overrides)
    settings = [variant for comparison in plan.comparisons.values() for variant in comparison.variants.values()]
    _refuse_overridden_variants(nested(values), overrides, settings, entry)
    comparisons = []
    for name, comparison in plan.comparisons.items():
        variants = tuple(
            _variant(label, merged(base, nested(own)), entry) for label, own in comparison.variants.items()
        )
        comparisons.append(Comparison(name, comparison.baseline, variants))
    return Plan(entry, plan.question, tuple(comparisons))


def load_single(entry: str, config: Path, overrides: Mapping[str, Any]) -> Plan:
    """Return the plan of an entry point of SINGLE: the configuration in the file `config`, with the user's overrides.

    Raises:
        InvalidInputError: as make_experiment, or this machine cannot run it.

    """
    variant = _variant(config.stem, merged(nested(read_yaml(config)), overrides), entry)
    if variant.skipped:
        raise InvalidInputError(f"{variant.skipped}; choose another value")
    return Plan(entry, f"What does {config} cost?", (Comparison("single", variant.name, (variant,)),))


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; no tags are followed, so no objects are made.

    Raises:
        InvalidInputError: it is missing, is not YAML, or is not a mapping.

    """
    try:
        values = yaml.safe_load(file.read_text())
    except OSError as error:
        raise InvalidInputError(f"{file} must be a readable file ({error.strerror}); check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise InvalidInputError(f"{file} must be plain YAML, without objects: {problem}; mend it there") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InvalidInputError(f"{file} must hold settings as `name: value` lines, and holds {values!r}; mend it")
    return values


def _variant(name: str, values: Mapping[str, Any], entry: str) -> Variant:
    experiment = make_experiment(values, entry)
    skipped = experiment.unsupported()
    if skipped is None:
        experiment.prepare()
    return Variant(name, experiment, skipped)


def _refuse_overridden_variants(
    values: Mapping[str, Any], overrides: Mapping[str, Any], variants: list[dict[str, Any]], entry: str
) -> None:
    """Refuse an override that no variant would see; the default, which MLproject always passes on, is no override."""
    default = dict(dotted(validate(AllSettings, values, entry).model_dump()))
    given = dict(dotted(validate(AllSettings, merged(values, overrides), entry).model_dump()))
    for name in (name for name, _ in dotted(overrides) if given[name] != default[name]):
        if all(name in variant for variant in variants):
            raise InvalidInputError(
                f"{name} is what {entry} varies, so {name}={given[name]} would have no effect; "
                f"run it alone: python -m pipeline main --{name} {given[name]}"
            )
