"""The workers of a search: threads that measure configurations at the same time, each in processes of its own."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from pipeline.base.errors import InvalidInputError
from pipeline.runtime.placement import placements
from pipeline.runtime.run import Execute, execute
from pipeline.searching.interface import Problem
from pipeline.searching.loop import Search, run_trials, search_and_verify


@dataclass(frozen=True)
class Workers:
    """How each worker runs an experiment, and what ends all of them."""

    executors: Sequence[Execute]
    cancelled: threading.Event


@contextmanager
def open_workers(problem: Problem) -> Iterator[Workers]:
    """Yield the workers that the search asks for: on this machine, or tasks of a Ray cluster.

    Raises:
        InvalidInputError: there are fewer GPUs or cores than workers, Ray is absent or not reachable, or its tasks,
            each of which sees its own GPUs alone, are to run on one that is named.

    """
    settings = problem.settings
    if settings.executor == "local":
        yield local_workers(problem, settings.workers)
        return
    if problem.is_device_named:
        raise InvalidInputError(
            f"executor=ray gives each trial a GPU of the cluster, and device={problem.base.device} names one; set "
            "device=cuda, or executor=local"
        )
    from pipeline.runtime.ray_executor import ray_executors  # Ray is optional

    cancelled = threading.Event()
    with ray_executors(
        settings.ray_address, problem.base.device, settings.workers, problem.num_devices, cancelled
    ) as executors:
        yield Workers(executors, cancelled)


def local_workers(problem: Problem, num_workers: int | None) -> Workers:
    """Return workers on this machine: None stands for one for each visible GPU like the first, or one on a CPU.

    Several workers on a CPU share its cores. torch then uses so many threads in this process as well, since what
    operators allocate on a CPU, and so a prediction, depends on their number.

    Raises:
        InvalidInputError: there are fewer GPUs or cores than workers.

    """
    cancelled = threading.Event()
    places = placements(problem.base.device, problem.is_device_named, num_workers, problem.num_devices)
    if places[0].cores is not None:
        torch.set_num_threads(len(places[0].cores))
    if len(places) == 1:  # in the main thread, which Ctrl-C interrupts
        return Workers([partial(execute, placement=places[0])], cancelled)
    return Workers([partial(execute, placement=place, cancelled=cancelled) for place in places], cancelled)


def search_with(workers: Workers, search: Search) -> None:
    """Run the trials by all workers and verify the answer: `search_and_verify` of several workers."""
    first = replace(search, executor=workers.executors[0], cancelled=workers.cancelled)
    search_and_verify(first, partial(run_trials_with, workers))


def run_trials_with(workers: Workers, search: Search, deadline: float) -> None:
    """Let all workers run trials until none is left; what ends one of them ends all.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; each worker has ended its process and stored its trial.

    """
    if len(workers.executors) == 1:
        run_trials(search, deadline)
        return
    with ThreadPoolExecutor(len(workers.executors), thread_name_prefix="worker") as pool:
        own = [replace(search, executor=one, cancelled=workers.cancelled) for one in workers.executors]
        running = [pool.submit(run_trials, one, deadline) for one in own]
        try:
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            for worker in ended:
                worker.result()
        except BaseException:
            workers.cancelled.set()
            raise
