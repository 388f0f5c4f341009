"""An entry point's YAML with the user's overrides -> its variants, all checked before the first one runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import NonNegativeInt, PositiveInt, model_validator

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.settings import Settings
from pipeline.config.entry_points import find_file, yaml_file
from pipeline.config.experiment import AUTO_MODEL, Experiment, make_experiment
from pipeline.config.given import dotted, merged, nested, split_off
from pipeline.config.other_names import foreign_configuration


@dataclass(frozen=True)
class Variant:
    """One of the configurations that an entry point compares."""

    comparison: str
    """The name of the comparison that it is part of."""
    name: str
    experiment: Experiment
    skipped: str | None
    """Why this machine cannot run it; None if it can."""
    is_baseline: bool
    """Whether the others of its comparison are compared with it."""


@dataclass(frozen=True)
class EntryPoint:
    """An entry point with everything that it runs."""

    entry: str
    question: str
    variants: tuple[Variant, ...]
    """Of all comparisons, in each the baseline first."""
    sections: tuple[str, ...] = ()
    """Names of files in report/sections/ that add to its report."""
    repeats: int = 1
    """How many times each variant is run again for its time."""
    save_every: int | None = None
    """Optimizer steps from one save to the next; None: nothing is saved."""
    resume: Path | None = None
    """The saved training that it goes on from."""


SAVED_CONFIG = "config.yaml"
"""The settings of a training in the folder that it was saved in."""


class SingleSettings(Settings):
    """The setting that the entry points of one configuration add to those of a run."""

    config: Path = Path("experiments/single/fp32.yaml")
    """The YAML file to run: one of experiments/single/, or the config.yaml or best.yaml of an earlier run."""


class MainSettings(SingleSettings):
    """The settings that `main` adds to those of a run."""

    save_every: PositiveInt | None = None
    """Save the training after so many optimizer steps each, and after the last, in saved/ of the run; none: never."""
    resume: Path | None = None
    """Go on from such a folder, as runs/.../saved/step_100, whose settings count where `config` is not given."""


class ComparisonSettings(Settings):
    """One comparison in an entry point's YAML."""

    baseline: str
    """The variant that the others are compared with."""
    variants: dict[str, dict[str, Any]]
    """The settings of each variant, by its name."""

    @model_validator(mode="after")
    def _baseline_is_a_variant(self) -> Self:
        if self.baseline not in self.variants:
            raise ValueError(f"must name one of its variants ({', '.join(self.variants)}) as its baseline")
        return self


class RepeatSettings(Settings):
    """The setting that entry points which compare variants add to those of a run."""

    repeats: NonNegativeInt = 1
    """How many times each variant is run again, for the noise of its time; 0: never, so that only large differences are
    beyond noise."""


class EntryPointSettings(RepeatSettings):
    """The keys of an entry point's YAML besides the settings that its variants share."""

    question: str
    """The question that the entry point answers."""
    comparisons: dict[str, ComparisonSettings]
    """The comparisons to run, by name."""
    sections: tuple[str, ...] = ()
    """Sections that are added to its report: names of files in report/sections/."""


def load_entry_point(entry: str, overrides: Mapping[str, Any]) -> EntryPoint:
    """Return an entry point from its YAML file with the user's overrides, all of its variants checked.

    Raises:
        InvalidInputError: as make_experiment, or an override has no effect because every variant sets it.

    """
    given = dict(overrides)
    repeats = {name: given.pop(name) for name in RepeatSettings.model_fields if name in given}
    own, values = split_off(EntryPointSettings, {**read_yaml(yaml_file(entry)), **repeats}, entry)
    _refuse_what_every_variant_sets(own, given, entry)
    base = merged(nested(values), given)
    variants = []
    for comparison, compared in own.comparisons.items():
        for name in sorted(compared.variants, key=lambda name: name != compared.baseline):
            experiment, skipped = _checked(merged(base, nested(compared.variants[name])), entry)
            variants.append(Variant(comparison, name, experiment, skipped, name == compared.baseline))
    return EntryPoint(entry, own.question, tuple(variants), own.sections, own.repeats)


def single_settings(entry: str) -> type[SingleSettings]:
    """Return the class of the settings that an entry point of SINGLE adds to those of a run."""
    return MainSettings if entry == "main" else SingleSettings


def load_single(entry: str, given: Mapping[str, Any], target: Hardware | None = None) -> EntryPoint:
    """Return an entry point of SINGLE: the configuration in the file `config`, with the user's other settings.

    It has to run on `target`, whose device and memory this machine need not have; None: on its own device.

    Raises:
        InvalidInputError: as make_experiment, or the target cannot run it.

    """
    kind = single_settings(entry)
    own, overrides = split_off(kind, given, entry)
    saving = own.model_dump(exclude={"config"})
    resume = saving.get("resume")
    config = own.config if resume is None or "config" in given else resume / SAVED_CONFIG
    if resume is not None and "config" not in given and not config.is_file():
        raise InvalidInputError(
            f"resume must be a folder that save_every wrote, such as runs/.../saved/step_100, and {resume} has no "
            f"{SAVED_CONFIG}; name another"
        )
    values = read_config(config)
    if {"effective_batch_size", "micro_batch_size"} <= values.keys():
        values.pop("accumulation_steps", None)  # it follows, also from another world_size
    if target is not None:
        overrides |= {"device": "cpu", "budget": None}
        if values.get("model", "auto") == "auto":
            overrides["model"] = AUTO_MODEL[target.kind]
    experiment, skipped = _checked(merged(nested(values), overrides), entry, target)
    if skipped:
        raise InvalidInputError(skipped)
    name, what = config.stem, str(config)
    if config == kind.model_fields["config"].default:  # which says nothing of what is trained
        name = Path(experiment.settings.model).name
        what = f"training {name}"
    variant = Variant("single", name, experiment, skipped, is_baseline=True)
    return EntryPoint(entry, f"What does {what} cost?", (variant,), **saving)


def read_config(file: Path) -> dict[str, Any]:
    """Return the settings in a configuration file of the user, or in Fitproof's own one of that name.

    Raises:
        InvalidInputError: as read_yaml(), or the file is for another tool.

    """
    if file.suffix == ".toml":
        raise InvalidInputError(
            f"{file} is TOML, as torchtitan's configurations are, and Fitproof reads YAML: fitproof simulate --gpu "
            "CARD -- COMMAND, with the command that trains with it, says what it needs"
        )
    values = read_yaml(find_file(file))
    if reason := foreign_configuration(file, values):
        raise InvalidInputError(reason)
    return values


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; tags are refused, so no objects are made.

    Raises:
        InvalidInputError: it is missing, is not YAML, or is not a mapping.

    """
    try:
        values = yaml.safe_load(file.read_text())
    except OSError as error:
        raise InvalidInputError(f"{file} must be a readable file ({error.strerror}); check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise InvalidInputError(f"{file} must be plain YAML, without objects: {problem}; correct it there") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InvalidInputError(f"{file} must contain `name: value` lines, and contains {values!r}; correct it")
    return values


def _checked(values: Mapping[str, Any], entry: str, target: Hardware | None = None) -> tuple[Experiment, str | None]:
    """Return the Experiment with these settings, and why this machine or the target cannot run it."""
    experiment = make_experiment(values, entry)
    skipped = experiment.unsupported(target)
    if skipped is None:
        experiment.prepare()
    return experiment, skipped


def _refuse_what_every_variant_sets(own: EntryPointSettings, overrides: Mapping[str, Any], entry: str) -> None:
    """Refuse an override that no variant would use."""
    variants = [variant for comparison in own.comparisons.values() for variant in comparison.variants.values()]
    for name, value in dotted(overrides):
        if all(name in variant for variant in variants):
            raise InvalidInputError(
                f"every variant of {entry} sets {name}, so {name}={value} would have no effect; "
                f"run it alone: fitproof main --{name} {value}"
            )
