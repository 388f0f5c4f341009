"""A pool of worker processes: `concurrent.futures.ProcessPoolExecutor` on processes forked from the fork server."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

import torch

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.runtime.fork_server import CONTEXT, begin_child, starting_processes

Argument = TypeVar("Argument")
Returned = TypeVar("Returned")


class WorkerError(RuntimeError):
    """A worker process raised an error, which the message names, or ended before its task was done."""


@contextmanager
def worker_pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of worker processes; an exception in the body, such as KeyboardInterrupt, ends them at once."""
    state = torch.get_num_threads(), dict(os.environ)
    pool = ProcessPoolExecutor(num_processes, CONTEXT, initializer=_start_worker, initargs=state)
    try:
        yield pool
    except BaseException:
        for process in list(pool._processes.values()):  # pool.kill_workers() from Python 3.14 on
            process.kill()
        if not pool._broken:  # else the pool's own thread closes them, maybe at this moment
            pool._result_queue._writer.close()  # type: ignore[attr-defined]  # else it waits for a killed worker
            pool._call_queue._reader.close()  # type: ignore[attr-defined]  # and before Python 3.11.5 so does another
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def run_all(
    pool: ProcessPoolExecutor, function: Callable[[Argument], Returned], arguments: Sequence[Argument]
) -> Iterator[tuple[int, Returned]]:
    """Call the function with each argument in a worker process; yield (argument's number, result) as completed.

    Raises:
        InvalidInputError: the function raised it.
        WorkerError: the function raised another error, or a process ended.

    """
    try:
        with starting_processes():  # submit() starts the processes
            futures = {pool.submit(_call, function, argument): number for number, argument in enumerate(arguments)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise WorkerError("a worker process ended before its task was done, probably for lack of memory") from error


def _start_worker(num_threads: int, variables: Mapping[str, str]) -> None:
    """Begin a worker process: predictions depend on the number of threads and on environment variables."""
    begin_child(variables)
    torch.set_num_threads(num_threads)


def _call(function: Callable[[Argument], Returned], argument: Argument) -> Returned:
    """Call the function; an error other than InvalidInputError is sent as text, since it may not be picklable."""
    try:
        return function(argument)
    except InvalidInputError:
        raise
    except Exception as error:
        raise WorkerError(f"{type(error).__name__}: {first_line(error)}") from error
