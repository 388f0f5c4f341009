"""The search of a command: its placeholders are the dimensions, and its runs are measured through a hook."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.processes import num_cores
from pipeline.base.results import Outcome, Result
from pipeline.base.technique import ROUNDOFF, Mathematics
from pipeline.base.units import MIB, parse_budget
from pipeline.config.command import Command, Runnable, remedies
from pipeline.config.command_template import Template, make_template
from pipeline.config.entry_points import yaml_file
from pipeline.config.experiment import why_untimed
from pipeline.config.given import validate, written
from pipeline.config.space import MICRO_BATCH, Choice, Space, key_of, sentences
from pipeline.config.variants import read_yaml
from pipeline.memory.allocator_options import VARIABLES, are_segments_decided, with_expandable_segments
from pipeline.memory.device import device_name, find_device, total_bytes
from pipeline.memory.work import Work
from pipeline.prediction.commands.command import Predicted, predict_commands
from pipeline.runtime.run import measured_summary
from pipeline.searching.candidates import Candidate, without_prediction
from pipeline.searching.command_space import changes_training, command_of, dimensions_of, why_refused
from pipeline.searching.experiment_problem import automatic_budget
from pipeline.searching.problem import Problem
from pipeline.searching.settings import CommandSearchSettings
from pipeline.searching.trials import Trial
from pipeline.simulation.cards import Card, card_called, find_card
from pipeline.training.metrics import PASSES_PER_MICRO_BATCH, Summary

WORK_OF_SEQUENCE, KERNELS_OF_PASS = 1e9, 1e3
"""Assumed work of a pass: operations of a sequence, and kernels. The time model finds what each of them takes."""
UPDATE_WORK = Work({"float32": WORK_OF_SEQUENCE}, num_kernels=KERNELS_OF_PASS)
NOT_PREDICTED = "the memory of a command on this device is measured, not predicted"
EXPANDED = "the shell seems to have expanded {name:value,value}: put quotes around it"


@dataclass(frozen=True, kw_only=True)
class CommandProblem(Problem):
    """A search problem whose configurations are Commands."""

    settings: CommandSearchSettings
    template: Template
    base: Command
    card: Card | None = None
    """The card on which the memory is simulated; None: it is only measured."""
    failures: dict[tuple[tuple[str, Any], ...], InvalidInputError] = field(default_factory=dict)
    """Why configurations could not be simulated: each is tried once."""

    def unpredicted(self, choices: Sequence[Choice]) -> list[Candidate]:
        """Return each configuration with assumed work, in their order."""
        return list(map(self._unpredicted, choices))

    def _unpredicted(self, choice: Choice) -> Candidate:
        command = self.runnable(choice)
        size, num_passes = command.micro_batch_size or 1, command.accumulation_steps or 1
        return Candidate(
            choice=choice,
            micro_batch_size=size,
            num_passes=num_passes,
            num_tokens=float(command.effective_batch_size),
            pass_work=Work({"float32": WORK_OF_SEQUENCE * size}, num_kernels=KERNELS_OF_PASS),
            update_work=UPDATE_WORK,
            is_work_known=self.card is None,
            predicted_bytes=None,
            is_expected=True,
            untraced=frozenset(choice.keys() - {MICRO_BATCH}),
        )

    def predicted(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates with the memory and the work of their commands on the simulated card."""
        outcomes = self._outcomes([self.runnable(one.choice) for one in candidates])
        return list(map(_candidate, candidates, outcomes))

    def check_first(self, candidates: Sequence[Candidate]) -> None:
        """Refuse the search on a card that the user has named if none of the first candidates can be simulated.

        Raises:
            InvalidInputError: none can.

        """
        if self.settings.gpu is None or not all(one.not_predicted for one in candidates):
            return
        command = self.runnable(candidates[0].choice)
        [outcome] = self._outcomes([command])  # which has all that the command says
        if isinstance(outcome, InvalidInputError):
            raise InvalidInputError(f"no configuration can be simulated: {outcome}\nit was: {command.line}")

    def _outcomes(self, commands: Sequence[Command]) -> Sequence[Predicted]:
        """Return the prediction of each command.

        Raises:
            InvalidInputError: the card that the user has named cannot be simulated.

        """
        if self.card is None:
            return [InvalidInputError(NOT_PREDICTED)] * len(commands)
        untried = [one for one in commands if key_of(one.choice) not in self.failures]
        try:
            found = predict_commands(untried, self.card, self.settings.install) if untried else []
        except InvalidInputError as error:
            if self.settings.gpu is not None:
                raise
            return [error] * len(commands)  # this machine's own card is measured in any case
        outcomes = {key_of(one.choice): outcome for one, outcome in zip(untried, found, strict=True)}
        self.failures.update({key: one for key, one in outcomes.items() if isinstance(one, InvalidInputError)})
        known = {**outcomes, **self.failures}
        return [known[key_of(one.choice)] for one in commands]

    def runnable(self, choice: Choice) -> Command:
        """Return the command of a configuration."""
        return command_of(self.settings, self.template, choice, self.base.device, self.base.budget_bytes)

    def verified(self, choice: Choice) -> Command:
        """Return the command of a configuration with as many steps as an answer is verified for."""
        return replace(self.runnable(choice), num_steps=self.settings.verify_steps)

    def summary(self, runnable: Runnable, result: Result) -> Summary:
        """Return the summary metrics of a run, with its peaks on the simulated card.

        On a CPU these are the run's own, beside what it allocated there.
        """
        measured = measured_summary(runnable, result)
        if self.card is None or not isinstance(runnable, Command):
            return measured
        [outcome] = self._outcomes([runnable])
        if isinstance(outcome, InvalidInputError):
            return replace(measured, prediction=f"not predicted: {first_line(outcome)}")
        peaks = {
            "peak_allocated_mib": outcome.peak_allocated_bytes / MIB,
            "peak_reserved_mib": outcome.peak_reserved_bytes / MIB,
        }
        metrics = {**measured.metrics, **{f"predicted_{name}": peak for name, peak in peaks.items()}}
        if self.base.device.type == "cpu" and result.outcome.completed:
            metrics |= {"peak_cpu_allocated_mib": metrics.pop("peak_allocated_mib", math.nan), **peaks}
        return replace(measured, metrics={name: one for name, one in metrics.items() if math.isfinite(one)})

    def roundoff(self, runs: Sequence[tuple[Choice, Result]]) -> float:
        """Return the largest round-off of the number formats in which these runs were seen to compute."""
        formats = {name for _, result in runs if result.finished for name in result.finished.number_formats}
        return max(ROUNDOFF[name] for name in {"fp32", *formats})

    def tokens_per_position(self, runnable: Runnable) -> float:
        """Return 1: what is compared are sequences."""
        return 1.0

    def how_to_fit(self, candidates: Sequence[Candidate]) -> str:
        """Return what a user can do."""
        return "add values that need less memory, or choose a larger budget"

    def why_not_searched(
        self, trials: Sequence[Trial], choice: Choice, result: Result, metrics: Mapping[str, float]
    ) -> str | None:
        """Return what the command said if its plain run failed, or that its passes do not follow the micro-batch."""
        outcomes = {result.outcome.value, *(one.outcome for one in trials)}
        if choice in self.baselines and outcomes == {Outcome.CRASHED}:
            line = self.runnable(choice).line
            hints = [EXPANDED] if self.template.looks_expanded else []
            failed = f"the command must train, and its plain run failed: {result.detail}"
            return "\n".join([failed, f"it was: {line}", *hints, *remedies(result.detail or "")])
        own = metrics.get(PASSES_PER_MICRO_BATCH)
        known = (one.metrics.get(PASSES_PER_MICRO_BATCH, own) for one in trials)
        other = next((number for number in known if number != own), None)
        if own is None or other is None:
            return None
        return (
            f"the backward passes of an optimizer step must follow the micro-batch, and this run made {own:g} for each "
            f"micro-batch of its size where an earlier one made {other:g}, so that both train with other batches; give "
            "the script {accumulation_steps} or {effective_batch_size} as an option"
        )

    @property
    def defaults(self) -> Mapping[str, Any]:
        """None: the first value of each placeholder is the plain one."""
        return {}

    def other_training(self, choice: Choice) -> Choice:
        """Return the values of known levers that make it another training."""
        return {
            name: choice[name]
            for name, lever in self.template.levers.items()
            if lever.mathematics is Mathematics.DIFFERENT and changes_training(lever, choice)
        }

    @property
    def own_conditions(self) -> dict[str, Any]:
        """The command with its files."""
        return {
            **{name: value for name, value in self.shared_params.items() if name not in ("device", "time_limit")},
            **self.template.digests,
            "patch": self.settings.patch,
            "env": self.settings.env,
        }

    @property
    def shared_params(self) -> dict[str, Any]:
        """The command with its placeholders, and what all of its runs share."""
        return {
            **{name: value for name, value in super().shared_params.items() if name != MICRO_BATCH},
            "command": shlex.join(self.template.words),
            "budget": f"{self.budget_bytes / MIB:g}MiB",
            "gpu": None if self.card is None else self.card.name,
        }

    @property
    def settings_for_workers(self) -> dict[str, Any]:
        """All settings of the search, with the budget that an automatic one is here."""
        settings = self.settings.model_dump(mode="json", exclude={*_OF_OWN_TRAININGS})
        return {**settings, "budget": self.shared_params["budget"]} if self.settings.budget == "auto" else settings


def make_command_problem(given: Mapping[str, Any]) -> CommandProblem:
    """Return the problem of a command with placeholders.

    Raises:
        InvalidInputError: a setting or a placeholder is wrong, or there is nothing to search.

    """
    if refused := [name for name in _OF_OWN_TRAININGS if name in given]:
        raise InvalidInputError(
            f"{refused[0]} is of Fitproof's own trainings, and this search is of a command; leave it out"
        )
    defaults = {name: value for name, value in read_yaml(yaml_file("search")).items() if name in _OF_A_RUN}
    settings = validate(CommandSearchSettings, {**defaults, **given}, "search")
    template = make_template(settings.command or "", settings.patch, settings.env, settings.space)
    if not template.words:
        raise InvalidInputError("a search needs a command behind --, and there is none; write it as in a shell")
    try:
        return _problem(given, settings, template)
    except InvalidInputError as error:
        if template.looks_expanded:
            raise InvalidInputError(f"{error}; {EXPANDED}") from error
        raise


def _problem(given: Mapping[str, Any], settings: CommandSearchSettings, template: Template) -> CommandProblem:
    device = find_device(settings.device)
    if device.type == "cuda" and not are_segments_decided() and template.variables.keys().isdisjoint(VARIABLES):
        both = {name: ("", value) for name, value in with_expandable_segments().items()}
        template = replace(template, variables={**template.variables, **both})
    for name in ("num_steps", "verify_steps"):
        reason = why_untimed(name, num_steps := getattr(settings, name), settings.timing_warmup_steps)
        if reason and num_steps:  # without steps nothing is verified
            raise InvalidInputError(reason)
    card = _card(settings, device)
    budget_bytes, notes = _budget(settings, device, card)
    limit_bytes = None if card is not None and device.type == "cpu" else budget_bytes
    space, refusals = Space(dimensions_of(settings, template)).without(partial(why_refused, settings, template))
    return CommandProblem(
        settings=settings,
        space=space,
        base=command_of(settings, template, space.choices[0], device, limit_bytes),
        given=given,
        notes=(*notes, *sentences(refusals), *_notes(template, space, card, device)),
        template=template,
        budget_bytes=budget_bytes,
        num_predicted_first=num_cores() if card else len(space.choices),  # all where nothing is simulated
        num_predicted_at_once=num_cores(),  # a simulated run takes about as long as a trial
        output=settings.output,
        seed=0,  # the command has one of its own
        card=card,
    )


_OF_A_RUN = ("num_steps", "timing_warmup_steps", "verify_steps")
"""Settings of search.yaml that hold for a command too."""
_OF_OWN_TRAININGS = ("config", "verify_varying_steps")
"""Settings of a search that a command does not have."""


def _card(settings: CommandSearchSettings, device: torch.device) -> Card | None:
    """Return the card to simulate: the one that is named, else the GPU of this machine if it is known."""
    if settings.gpu is not None:
        return find_card(settings.gpu)
    return card_called(device_name(device), total_bytes(device) / MIB)


def _budget(settings: CommandSearchSettings, device: torch.device, card: Card | None) -> tuple[int, tuple[str, ...]]:
    """Return the budget in bytes, and a sentence about one that was chosen: of a card it is what its context leaves."""
    if card is not None and settings.gpu is not None:
        free_mib = card.memory_mib - card.context.mib
        if settings.budget == "auto":
            return free_mib * MIB, (f"budget: {free_mib:,} MiB, all of {card.name} beside its context",)
        return parse_budget(settings.budget, free_mib * MIB), ()
    if settings.budget == "auto" and device.type == "cpu":
        raise InvalidInputError(
            "a search of a command on a CPU needs a budget or a card; set --budget 2GiB, or --gpu t4"
        )
    text, notes = automatic_budget(device) if settings.budget == "auto" else (settings.budget, ())
    return parse_budget(text, total_bytes(device)), notes


def _notes(template: Template, space: Space, card: Card | None, device: torch.device) -> tuple[str, ...]:
    values = {name: ", ".join(written(one) or "none" for one in some) for name, some in space.dimensions.items()}
    searched = "; ".join(f"{name}: {some}" for name, some in values.items())
    where = []
    if card is not None:
        times = "" if device.type == "cuda" else f", times are of {device_name(device)}"
        where = [f"memory is that of a simulated {card.name}{times}"]
    return (f"searched: {searched}", *where, *([EXPANDED] if template.looks_expanded else []))


def _candidate(candidate: Candidate, outcome: Predicted) -> Candidate:
    if isinstance(outcome, InvalidInputError):
        return without_prediction(candidate, outcome)
    found = replace(candidate, is_expected=False, predicted_bytes=outcome.peak_reserved_bytes)
    if outcome.passes_work is None or outcome.update_work is None:
        return found
    pass_work = outcome.passes_work / candidate.num_passes
    return replace(found, pass_work=pass_work, update_work=outcome.update_work, is_work_known=True)
