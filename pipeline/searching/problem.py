"""A search, fully specified: what all trials share, and the space of what they choose from, all checked."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.base.errors import InvalidInputError
from pipeline.config.entry_points import yaml_file
from pipeline.config.experiment import Experiment, make_experiment, why_untimed
from pipeline.config.settings import TECHNIQUES, AllSettings, RunSettings, dotted, merged, nested, validate
from pipeline.config.space import Choice, Space, read_space
from pipeline.config.variants import read_yaml
from pipeline.memory.device import find_device
from pipeline.runtime.environment import environment
from pipeline.runtime.shape_check import check_shapes
from pipeline.searching.optuna_samplers import naive_choices
from pipeline.searching.settings import SearchSettings

AUTO_BUDGET = {"cuda": "80%", "cpu": "256MiB"}
NOT_PART_OF_IDENTITY = ("output", "dataset_size", "time_limit", "accumulation_steps")
"""Settings that change no measurement, or that follow from another."""
TECHNIQUE_SETTINGS = {name for technique in TECHNIQUES.values() for name in technique.model_fields}
"""Settings that no corpus depends on."""


@dataclass(frozen=True)
class SearchPlan:
    """A search, fully specified and checked."""

    settings: SearchSettings
    run_values: Mapping[str, Any]
    """What every trial sets; the choice comes on top."""
    space: Space
    base: Experiment
    """The first configuration of the space, for what all of them share."""

    def experiment(self, choice: Choice) -> Experiment:
        """Return the Experiment of one configuration."""
        return make_experiment(merged(self.run_values, nested(choice)), "search")

    @property
    def budget_bytes(self) -> int:
        """Memory to stay within."""
        budget = self.base.budget_bytes
        assert budget is not None  # plan_search has set one
        return budget

    @property
    def naive(self) -> list[Choice]:
        """What a person would try: the default precision, no checkpointing, the largest micro-batch first."""
        defaults = dict(dotted(AllSettings().model_dump()))
        return naive_choices(self.space, {name: defaults[name] for name in self.space.dimensions})

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change while a study goes on, as the storage keeps it."""
        left_out = {*NOT_PART_OF_IDENTITY, *self.space.dimensions}
        about = environment(self.base.device)
        facts = {
            **{name: value for name, value in self.base.params().items() if name not in left_out},
            **{f"space.{name}": list(values) for name, values in self.space.dimensions.items()},
            "objectives": self.settings.objectives,
            "device_name": about["device_name"],
            "torch": about["torch"],
        }
        stored: dict[str, Any] = json.loads(json.dumps(facts))
        return stored


def plan_search(given: Mapping[str, Any]) -> SearchPlan:
    """Return the plan of experiments/search.yaml with the user's overrides, every configuration of its space checked.

    Raises:
        InvalidInputError: a setting, a dimension or one of its values is wrong.

    """
    values = merged(nested(read_yaml(yaml_file("search"))), given)
    own = validate(SearchSettings, {k: values.pop(k) for k in SearchSettings.model_fields if k in values}, "search")
    device = find_device(str(values.get("device", RunSettings.model_fields["device"].default)))
    values["budget"] = AUTO_BUDGET[device.type] if own.budget == "auto" else own.budget
    _, space = read_space(own, values, given, "search")
    plan = SearchPlan(own, values, space, make_experiment(merged(values, nested(space.choices[0])), "search"))
    reason = why_untimed("verify_steps", own.verify_steps, plan.base.settings.timing_warmup_steps)
    if own.verify_steps and reason:
        raise InvalidInputError(f"{reason}, or 0 to leave the check out")
    prepared: set[str] = set()
    experiments = [plan.experiment(choice) for choice in space.choices]
    check_shapes(experiments)
    for experiment in experiments:
        reason = experiment.unsupported()
        if reason:
            raise InvalidInputError(f"{reason}; take it out of the space")
        needs = json.dumps({k: v for k, v in experiment.params().items() if k not in TECHNIQUE_SETTINGS})
        if needs not in prepared:
            experiment.prepare()
            prepared.add(needs)
    return plan
