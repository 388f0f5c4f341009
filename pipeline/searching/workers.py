"""The workers of a search, which measure configurations at the same time: how each runs them in processes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from pipeline.base.errors import InvalidInputError
from pipeline.runtime.placement import placements
from pipeline.runtime.run import Execute, execute
from pipeline.searching.problem import Problem


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
