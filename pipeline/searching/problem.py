"""What a search needs of its problem: a prediction and a run of each configuration, whatever trains there."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline.base.results import Result
from pipeline.config.command import ACCUMULATION, WORLD_SIZE, Runnable
from pipeline.config.given import dotted, written
from pipeline.config.space import Choice, Space
from pipeline.memory.device import is_named
from pipeline.runtime.environment import environment
from pipeline.searching.candidates import Candidate
from pipeline.searching.settings import SearchSettings
from pipeline.searching.trials import Trial
from pipeline.training.metrics import Summary


@dataclass(frozen=True, kw_only=True)
class Problem(ABC):
    """A space of configurations, fully specified and checked: of Fitproof's own training, or of a command."""

    settings: SearchSettings
    space: Space
    base: Runnable
    """The first configuration of the space."""
    budget_bytes: int
    num_predicted_first: int
    """So many configurations are predicted before the first trial, if there are no more."""
    num_predicted_at_once: int
    """So many are predicted together during the search."""
    output: Path
    """Folder of the results on local disk."""
    seed: int
    """Seed of Optuna's samplers."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the command that started the search."""
    notes: tuple[str, ...] = ()
    """The automatic budget, and how many configurations were left out of the space and why; a sentence each."""

    @abstractmethod
    def unpredicted(self, choices: Sequence[Choice]) -> list[Candidate]:
        """Return what is known of each configuration before its prediction, in their order."""

    @abstractmethod
    def predicted(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates with their predictions, in their order."""

    def check_first(self, candidates: Sequence[Candidate]) -> None:  # noqa: B027  most need no prediction to be measured
        """Refuse the search if it needs predictions, and none of the first candidates has one."""

    @abstractmethod
    def runnable(self, choice: Choice) -> Runnable:
        """Return what a trial of a configuration runs."""

    @abstractmethod
    def verified(self, choice: Choice) -> Runnable:
        """Return what a verification of a configuration runs."""

    @abstractmethod
    def summary(self, runnable: Runnable, result: Result) -> Summary:
        """Return the summary metrics of a run, with its predicted peaks."""

    @abstractmethod
    def roundoff(self, runs: Sequence[tuple[Choice, Result]]) -> float:
        """Return by which share the number formats of these runs may change a loss."""

    @abstractmethod
    def tokens_per_position(self, runnable: Runnable) -> float:
        """Return the share of what a run trains on that is no padding."""

    @abstractmethod
    def how_to_fit(self, candidates: Sequence[Candidate]) -> str:
        """Return what could be changed if none of these fits, as the end of a sentence."""

    @property
    @abstractmethod
    def defaults(self) -> Mapping[str, Any]:
        """The default of each dimension that has one, by name; of others the first value is."""

    @abstractmethod
    def other_training(self, choice: Choice) -> Choice:
        """Return the values of a configuration that make it another training."""

    @property
    def baselines(self) -> list[Choice]:
        """The plain configurations, the largest micro-batch first."""
        return self.space.with_values(self.space.plain_values(self.defaults))

    def baseline_beside(self, choice: Choice) -> list[Choice]:
        """Return the configurations to compare `choice` with, the largest micro-batch first.

        They have the values that make it another training, and of the others those of the baselines, as far
        as the space has such configurations.
        """
        kept = self.other_training(choice)
        plain = {**self.space.plain_values(self.defaults), **kept}
        alike = (one for one in self.space.choices if kept.items() <= one.items())
        nearest = min(alike, key=lambda one: sum(one[name] != value for name, value in plain.items()), default=None)
        return [] if nearest is None else self.space.with_values({name: nearest[name] for name in plain})

    @property
    def identity(self) -> dict[str, Any]:
        """The conditions of the measurements, which one study must have in common, as JSON values.

        On a CPU measurements with other cores do not compare: each worker has as many as torch's threads, which are set
        where the workers are opened.
        """
        about = environment(self.base.device)
        conditions = {
            **self.own_conditions,
            **{f"space.{name}": list(values) for name, values in self.space.dimensions.items()},
            "space.mathematics": self.settings.mathematics,
            **({"cores_per_worker": torch.get_num_threads()} if self.base.device.type == "cpu" else {}),
            "objectives": self.settings.objectives,
            **{name: about[name] for name in ("device_name", "torch", "transformers")},
        }
        stored: dict[str, Any] = json.loads(json.dumps(conditions))
        return stored

    @property
    @abstractmethod
    def own_conditions(self) -> dict[str, Any]:
        """What the measurements of this kind of problem have in common beside space, objectives and device."""

    @property
    def num_devices(self) -> int:
        """The most devices that a configuration of the space trains on."""
        return max(int(str(size)) for size in self.space.dimensions.get(WORLD_SIZE, (self.base.world_size,)))

    @property
    def is_device_named(self) -> bool:
        """Whether the setting names one GPU of several, as cuda:1 does."""
        return is_named(str(self.settings_for_workers.get("device", "")))

    @property
    @abstractmethod
    def settings_for_workers(self) -> dict[str, Any]:
        """The settings by which a worker elsewhere makes the same problem, as JSON values; no budget is automatic."""

    def why_not_searched(
        self, trials: Sequence[Trial], choice: Choice, result: Result, metrics: Mapping[str, float]
    ) -> str | None:
        """Return why a run beside these earlier trials shows that nothing can be searched; None if it does not."""
        return None

    @property
    def shared_params(self) -> dict[str, Any]:
        """The settings that no configuration changes, by dotted name."""
        varied = {ACCUMULATION, *self.space.dimensions}
        return {name: value for name, value in self.base.params().items() if name not in varied}

    @property
    def directions(self) -> tuple[str, ...]:
        """Optuna's direction of each objective: the speed and, for the Pareto front, peak bytes."""
        return ("maximize", "minimize") if self.settings.objectives == "pareto" else ("maximize",)

    @property
    def given_words(self) -> dict[str, str]:
        """The settings of the command, by dotted name, as they are written on a command line."""
        settings = dict(self.given)
        space = {"space": settings.pop("space")} if "space" in settings else {}  # its dimensions are no settings
        return {name: written(value) for name, value in [*dotted(settings), *space.items()]}
