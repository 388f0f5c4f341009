"""The Experiments of a space: values are validated once for each dimension, not for each of its configurations."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pipeline.base.contracts import Hardware
from pipeline.base.technique import Mathematics
from pipeline.config.experiment import Experiment, check_settings, completed, with_length
from pipeline.config.given import merged, nested, validate
from pipeline.config.settings import TECHNIQUES, AllSettings, RunSettings
from pipeline.config.space import Choice, Value, why_not_included

TECHNIQUE_SETTINGS = {name for technique in TECHNIQUES.values() for name in technique.model_fields}
"""Settings on which neither the model nor the corpus depends."""


class Configurations:
    """Makes the Experiments of configurations that share `values`, those of the entry point `entry`."""

    def __init__(self, values: Mapping[str, Any], entry: str) -> None:
        self.values, self._entry = values, entry
        self._changes: dict[tuple[str, Value, type], dict[str, Any]] = {}
        self._checked: set[tuple[Any, ...]] = set()

    def experiment(self, choice: Choice) -> Experiment:
        """Return the Experiment of one configuration, completed and checked as by make_experiment().

        Raises:
            InvalidInputError: as make_experiment().

        """
        changes: dict[str, Any] = {}
        for name, value in choice.items():
            changes = merged(changes, self._change(name, value))
        for name, change in changes.items():
            if isinstance(change, dict):  # of a model or corpus
                changes[name] = getattr(self._base, name).model_copy(update=change)
        experiment = completed(self._base.model_copy(update=changes))
        others = tuple(item for item in choice.items() if item[0] not in TECHNIQUE_SETTINGS)
        if others not in self._checked:
            check_settings(experiment)
            self._checked.add(others)
        return with_length(experiment)

    @cached_property
    def _base(self) -> RunSettings:
        return validate(AllSettings, self.values, self._entry)

    def _change(self, name: str, value: Value) -> dict[str, Any]:
        """Return the change of the settings by one value of a dimension, as its type reads it."""
        key = name, value, type(value)
        if key not in self._changes:
            change = nested({name: value})
            settings: Any = validate(AllSettings, merged(self.values, change), self._entry)
            for part in name.split("."):
                settings = getattr(settings, part)
            self._changes[key] = nested({name: settings})
        return self._changes[key]


def why_refused(experiment: Experiment, choice: Choice, hardware: Hardware, limit: Mathematics) -> str | None:
    """Return why the configuration `choice` is not in the space, or None if it is.

    A technique without a dimension is part of every configuration, so it changes the training as was asked for.
    """
    for technique in experiment.techniques:
        varied = [name for name in type(technique).model_fields if name in choice]
        values = ", ".join(f"{name}={getattr(technique, name)}" for name in varied)
        if varied and (reason := why_not_included(limit, values, technique.mathematics)):
            return reason
    return experiment.unsupported(hardware)
