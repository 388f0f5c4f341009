"""What a search begins with: its problem, a sampler that has the first predictions, and its workers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB
from pipeline.runtime.placement import placements
from pipeline.runtime.run import Execute, execute
from pipeline.searching.acquisition import Rules
from pipeline.searching.candidates import Candidate, known_peaks
from pipeline.searching.command_problem import make_command_problem
from pipeline.searching.experiment_problem import make_experiment_problem
from pipeline.searching.problem import Problem
from pipeline.searching.sampler import Predict, PredictiveSampler, expectation_of
from pipeline.searching.settings import CommandSettings
from pipeline.searching.trials import label


def problem_of(given: Mapping[str, Any]) -> Problem:
    """Return the problem, every configuration of its space checked.

    Raises:
        InvalidInputError: a setting, a dimension or one of its values is wrong.

    """
    if given.get("command") is not None:
        return make_command_problem(given)
    if alone := [name for name in CommandSettings.model_fields if name in given]:
        raise InvalidInputError(
            f"{alone[0]} belongs to a search of a command, and there is none; write it behind --: fitproof search "
            "--effective_batch_size 64 -- python train.py --batch {micro_batch_size}"
        )
    return make_experiment_problem(given)


def make_sampler(problem: Problem, predict: Predict | None = None) -> PredictiveSampler | None:
    """Return the predictive sampler, which predicts what it proposes; None for one of Optuna's samplers.

    It predicts with `predict`, by default with the problem's own `predicted`.

    Of a small space all configurations are predicted at once, of a larger one those that tell most of the others.
    All are too where predictions would disturb the times that other workers measure.

    Raises:
        InvalidInputError: nothing is predicted to fit.

    """
    if problem.settings.sampler != "predictive":
        return None
    rules = Rules(
        budget_bytes=problem.budget_bytes,
        fit_confidence=problem.settings.fit_confidence,
        gap=problem.settings.gap,
        kind=problem.base.device.type,
        whole_front=problem.settings.objectives == "pareto",
    )
    choices = problem.space.choices
    unpredicted = problem.unpredicted(choices)
    sampler = PredictiveSampler(unpredicted, rules, predict or problem.predicted, problem.num_predicted_at_once)
    are_timed_meanwhile = rules.kind == "cpu" and (problem.settings.workers or 1) > 1  # by others, on the same cores
    are_all = are_timed_meanwhile or len(choices) <= problem.num_predicted_first
    sampler.predict(range(len(choices)) if are_all else expectation_of(unpredicted).first())
    problem.check_first([one for one in sampler.candidates if not one.is_expected])
    while sampler.first is None:
        if not sampler.predict_leanest():
            raise InvalidInputError(_nothing_fits(problem, sampler.candidates))
    return sampler


def _nothing_fits(problem: Problem, candidates: Sequence[Candidate]) -> str:
    peak_bytes, number = min(known_peaks(candidates))
    leanest, peak, budget = candidates[number], peak_bytes / MIB, problem.budget_bytes / MIB
    return (
        f"no configuration is predicted to fit the budget: the smallest predicted peak is {peak:,.1f} MiB, "
        f"{peak - budget:,.1f} MiB more than the {budget:,.1f} MiB ({label(leanest.choice)}); "
        f"{problem.how_to_fit(candidates)}"
    )


@contextmanager
def open_workers(problem: Problem) -> Iterator[Sequence[Execute]]:
    """Yield an executor for each worker that the search asks for: on this machine, or in tasks of a Ray cluster.

    Raises:
        InvalidInputError: there are fewer GPUs or cores than workers, Ray is absent or not reachable, or its tasks,
            each of which sees its own GPUs alone, are to run on one that is named.

    """
    settings = problem.settings
    if settings.executor == "local":
        yield local_workers(problem)
        return
    if problem.is_device_named:
        raise InvalidInputError(
            f"executor=ray gives each trial a GPU of the cluster, and device={problem.base.device} names one; set "
            "device=cuda, or executor=local"
        )
    from pipeline.runtime.ray_executor import ray_executors  # Ray is optional

    with ray_executors(settings.ray_address, problem.base.device, settings.workers, problem.num_devices) as executors:
        yield executors


def local_workers(problem: Problem) -> Sequence[Execute]:
    """Return an executor for each worker on this machine.

    Several workers on a CPU share its cores. torch then uses so many threads in this process as well, since what
    operators allocate on a CPU, and so a prediction, depends on their number.

    Raises:
        InvalidInputError: there are fewer GPUs or cores than workers.

    """
    places = placements(problem.base.device, problem.is_device_named, problem.settings.workers, problem.num_devices)
    if places[0].cores is not None:
        torch.set_num_threads(len(places[0].cores))
    return [partial(execute, placement=place) for place in places]
