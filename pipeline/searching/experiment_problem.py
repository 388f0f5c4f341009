"""The search of Fitproof's own training: the settings that all trials share and the space, all checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic_core import to_jsonable_python

from pipeline.base.errors import InvalidInputError
from pipeline.base.processes import num_cores
from pipeline.base.results import Result
from pipeline.base.technique import ROUNDOFF, Mathematics
from pipeline.base.units import MIB, parse_budget
from pipeline.base.user_functions import module_digest
from pipeline.config.command import Runnable
from pipeline.config.configurations import TECHNIQUE_SETTINGS, Configurations, why_refused
from pipeline.config.experiment import VARYING, Experiment, make_experiment, why_untimed
from pipeline.config.given import dotted, merged, nested, split_off
from pipeline.config.settings import TECHNIQUES, RunSettings, default_values
from pipeline.config.space import Choice, read_space, sentences, space_values
from pipeline.config.user_techniques import is_user_technique
from pipeline.memory.device import device_name, equal_gpus, find_device, free_bytes, hardware_of, is_named, total_bytes
from pipeline.planning.clipping import cost_of_clipping
from pipeline.planning.promising import FEWEST
from pipeline.prediction.patches import notes_on
from pipeline.prediction.summary import summary
from pipeline.runtime.shape_check import check_shapes
from pipeline.searching.candidates import Candidate, known_peaks, unpredicted, with_predictions
from pipeline.searching.problem import Problem
from pipeline.searching.settings import SearchSettings
from pipeline.training.metrics import Summary
from pipeline.training.typical_step import evaluation_note, lengths_note, typical_step

CPU_BUDGET = "256MiB"
SHARE_OF_FREE, BUDGET_STEP_MIB = 0.8, 512
"""The automatic budget of a GPU: this share of its free memory, rounded down to a multiple of the step."""
PREDICTED_PER_CORE = 4
"""Configurations that are predicted together for each core: a prediction takes a second or less."""
NOT_PART_OF_IDENTITY = ("output", "dataset_size", "time_limit")
"""Settings that do not affect a measurement, or follow from others."""


@dataclass(frozen=True, kw_only=True)
class ExperimentProblem(Problem):
    """A search problem whose configurations are Experiments."""

    base: Experiment
    configurations: Configurations
    """Makes the Experiments of the space of the settings that all trials share."""

    def unpredicted(self, choices: Sequence[Choice]) -> list[Candidate]:
        """Return what is known of each configuration before its prediction, in their order."""
        return [unpredicted(choice, self.runnable(choice)) for choice in choices]

    def predicted(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates with their predictions, in their order."""
        return with_predictions(candidates, [self.runnable(one.choice) for one in candidates], self.budget_bytes)

    def runnable(self, choice: Choice) -> Experiment:
        """Return the Experiment of one configuration."""
        return self.configurations.experiment(choice)

    def verified(self, choice: Choice) -> Experiment:
        """Return the Experiment of a trial with as many optimizer steps as an answer is verified for."""
        changes = {"num_steps": num_verified_steps(self)}
        return make_experiment(merged(merged(self.configurations.values, nested(choice)), changes), "search")

    def summary(self, runnable: Runnable, result: Result) -> Summary:
        """Return the summary metrics of a run, with its predicted peaks."""
        assert isinstance(runnable, Experiment)
        return summary(runnable, result)

    def roundoff(self, runs: Sequence[tuple[Choice, Result]]) -> float:
        """Return the largest round-off of the number formats of these configurations' techniques."""
        techniques = [each for choice, _ in runs for each in self.configurations.experiment(choice).techniques]
        return max(ROUNDOFF[each.number_format] for each in techniques if each.number_format is not None)

    def tokens_per_position(self, runnable: Runnable) -> float:
        """Return the share of a typical step's tokens that is no padding."""
        assert isinstance(runnable, Experiment)
        return typical_step(runnable, runnable.read_corpus()).tokens_per_position

    def how_to_fit(self, candidates: Sequence[Candidate]) -> str:
        """Return the change of the leanest configuration that lowers its peak most, and what clipping costs."""
        _, number = min(known_peaks(candidates))
        return f"{_change_that_helps(self, candidates[number].choice)}{_what_clipping_costs(self, candidates)}"

    @property
    def settings_for_workers(self) -> dict[str, Any]:
        """The values of each dimension, and all that the YAML files and the user set beside them.

        A value that a file sets for a dimension, which still varies, would be its only one if it were given.
        """
        dimensions = self.space.dimensions
        shared = nested({name: value for name, value in dotted(self.configurations.values) if name not in dimensions})
        own = self.settings.model_dump(mode="json", exclude={"config"})
        space = {name: list(values) for name, values in dimensions.items()}
        return {**own, **to_jsonable_python(shared), "space": space}

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The default of every setting."""
        return default_values()

    def other_training(self, choice: Choice) -> Choice:
        """Return the values that belong to a technique of another mathematics."""
        return {
            name: choice[name]
            for technique in self.configurations.experiment(choice).techniques
            for name in type(technique).model_fields
            if name in choice and technique.mathematics is Mathematics.DIFFERENT
        }

    @property
    def own_conditions(self) -> dict[str, Any]:
        """The settings that all trials share, the code of user techniques, the corpus, and whether lengths vary."""
        return {
            **{name: value for name, value in self.shared_params.items() if name not in NOT_PART_OF_IDENTITY},
            **{
                f"code.{name}": module_digest(technique.__module__)
                for name, technique in TECHNIQUES.items()
                if is_user_technique(technique) and set(technique.model_fields) & {*self.space.dimensions}
            },
            **({"lengths": "of each micro-batch"} if self.base.lengths_vary else {}),
            "corpus_digest": self.base.read_corpus().digest,
        }


def num_verified_steps(problem: ExperimentProblem) -> int:
    """Return for how many optimizer steps the answer is trained again.

    Where the lengths of sequences vary, so many on a GPU that what its allocator reserves grows as in a training. On a
    CPU nothing is reserved, and no step needs more than the first two.
    """
    settings = problem.settings
    kinds = {problem.base.settings.sequences, *problem.space.dimensions.get("sequences", ())}
    fragments = problem.base.device.type == "cuda" and not kinds.isdisjoint(VARYING)
    return max(settings.verify_steps, settings.verify_varying_steps if fragments else 0)


def make_experiment_problem(given: Mapping[str, Any]) -> ExperimentProblem:
    """Return the problem of search.yaml, the file `config` and the user's overrides.

    Every configuration of its space is checked. Configurations that the device does not support leave the space.

    Raises:
        InvalidInputError: a setting, a dimension or one of its values is wrong, or the device supports none of them.

    """
    own, values = split_off(SearchSettings, space_values("search", given), "search")
    if own.budget == "none":
        raise InvalidInputError("a search needs a budget, and budget is none; set budget=auto, or one such as 8GiB")
    text = str(values.get("device", RunSettings.model_fields["device"].default))
    device = find_device(text)
    devices = [device] if device.type == "cpu" or is_named(text) else equal_gpus()[: own.workers]
    values["budget"], notes = automatic_budget(*devices) if own.budget == "auto" else (own.budget, ())
    _, space = read_space(own, values, given, "search", hardware_of(device))
    configurations, hardware = Configurations(values, "search"), hardware_of(device)

    def refused(choice: Choice) -> str | None:
        return why_refused(configurations.experiment(choice), choice, hardware, own.mathematics)

    space, refusals = space.without(refused)
    base = configurations.experiment(space.choices[0])
    varied = [{**space.choices[0], name: value} for name, tried in space.dimensions.items() for value in tried]
    experiments = [configurations.experiment(choice) for choice in varied]
    of_models = dict.fromkeys(note for one in experiments if (note := one.description.note))
    of_each = {(one.settings.sequences, one.settings.sequence_length): one for one in experiments}
    lengths = [note for one in of_each.values() for note in (lengths_note(one), evaluation_note(one)) if note]
    problem = ExperimentProblem(
        settings=own,
        configurations=configurations,
        space=space,
        base=base,
        budget_bytes=parse_budget(values["budget"], total_bytes(device)),
        num_predicted_first=FEWEST,  # as many as a plan predicts without choosing
        num_predicted_at_once=PREDICTED_PER_CORE * num_cores(),
        output=base.settings.output,
        seed=base.settings.seed,
        given=given,
        notes=(*notes, *sentences(refusals), *notes_on(experiments, hardware), *of_models, *lengths),
    )
    _check(problem)
    return problem


def automatic_budget(device: torch.device, *others: torch.device) -> tuple[str, tuple[str, ...]]:
    """Return the budget that `auto` stands for on a device and `others` like it, and a sentence that explains it.

    On GPUs it is a share of what is free on each, rounded down in large steps: free memory varies by a few MiB between
    two commands, which must not make another budget and so another study.
    """
    if device.type == "cpu":
        return CPU_BUDGET, (f"budget: {CPU_BUDGET}, the default on a CPU, which suits gpt2-nano",)
    free = min(map(free_bytes, (device, *others)))
    budget_mib = int(SHARE_OF_FREE * free / MIB) // BUDGET_STEP_MIB * BUDGET_STEP_MIB
    each = f"each of {1 + len(others)} " if others else ""
    where = f"{free / 2**30:.1f} GiB that are free on {each}{device_name(device)}"
    if not budget_mib:
        raise InvalidInputError(
            f"an automatic budget is {100 * SHARE_OF_FREE:.0f} % of the free memory in steps of {BUDGET_STEP_MIB} MiB, "
            f"which leaves nothing of the {where}; end what uses the GPU, or set budget"
        )
    budget = f"{budget_mib / 1024:g}GiB"
    return budget, (f"budget: {budget}, {100 * SHARE_OF_FREE:.0f} % of the {where}, rounded down",)


def _check(problem: ExperimentProblem) -> None:
    """Refuse lengths that time no step, models that cannot be built, and a corpus that is too short."""
    settings = problem.settings
    reason = why_untimed("verify_steps", settings.verify_steps, problem.base.settings.timing_warmup_steps)
    if settings.verify_steps and reason:
        raise InvalidInputError(f"{reason}, or 0 to skip the verification")
    experiments = [problem.runnable(choice) for choice in problem.space.choices]
    check_shapes(experiments)
    prepared: set[tuple[Any, ...]] = set()
    for choice, experiment in zip(problem.space.choices, experiments, strict=True):
        needs = experiment.effective_batch_size, *((k, v) for k, v in choice.items() if k not in TECHNIQUE_SETTINGS)
        if needs not in prepared:
            experiment.prepare()
            prepared.add(needs)


def _what_clipping_costs(problem: ExperimentProblem, candidates: Sequence[Candidate]) -> str:
    """Return what the candidates would need without clipping, as further text."""
    known = [(candidates[number], peak_bytes) for peak_bytes, number in known_peaks(candidates)]
    peaks = [(problem.runnable(one.choice), peak_bytes) for one, peak_bytes in known]
    sentence = cost_of_clipping(peaks, hardware_of(problem.base.device), problem.budget_bytes)
    return f". {sentence.removesuffix('.')}" if sentence else ""


def _can_be(problem: ExperimentProblem, choice: Choice) -> bool:
    """Whether a configuration outside of the space is one, and not refused."""
    hardware, limit = hardware_of(problem.base.device), problem.settings.mathematics
    try:
        return why_refused(problem.runnable(choice), choice, hardware, limit) is None
    except InvalidInputError:  # a number that is given and the value contradict each other
        return False


def _change_that_helps(problem: ExperimentProblem, choice: Choice) -> str:
    """Return the change of one setting that lowers the smallest predicted peak most, and the new peak, as text."""
    settings: Any = problem.runnable(choice).settings
    changes = {
        "micro_batch_size": 1,
        "checkpointing": "every_layer",
        "precision": "bf16",
        "loss_kernel": "chunked",
        "sequence_length": max(2, settings.sequence_length // 2),
    }
    others = {
        name: value
        for name, value in changes.items()
        if getattr(settings, name) != value and _can_be(problem, {**choice, name: value})
    }
    changed = problem.unpredicted([{**choice, name: value} for name, value in others.items()])
    candidates = problem.predicted(changed) if changed else []
    peak_bytes, number = min(known_peaks(candidates), default=(0, None))
    if number is None:
        return "choose a smaller model or a larger budget"
    name, peak = list(others)[number], peak_bytes / MIB
    return (
        f"{name}={others[name]} would help most, with {peak:,.1f} MiB; else choose a smaller model or a larger budget"
    )
