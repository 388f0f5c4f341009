"""Runs experiments as tasks of a Ray cluster, each on a GPU of its own, in a child process of the task's process.

A task hosts the same `execute` as a run on this machine, and streams its events back. The process of a task serves
further tasks: it keeps the fork server, which has imported torch, and a child's CUDA context ends with the child. A
child has the environment variables of its task, among which Ray names its GPUs.
"""

import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.results import Result
from pipeline.config.command import Runnable
from pipeline.memory import allocator_options
from pipeline.memory.device import device_name
from pipeline.runtime.environment import versions, why_other_versions
from pipeline.runtime.observer import Observer
from pipeline.runtime.rank import Work
from pipeline.runtime.run import SECONDS_TO_END, Execute, WorkerLostError, execute
from pipeline.runtime.watch import SECONDS_BETWEEN_POLLS
from pipeline.training.loop import Stop, never_stop

PASSED_ON = ("FITPROOF_TECHNIQUES", "OMP_NUM_THREADS", *allocator_options.VARIABLES)
"""Environment variables that tasks need as this process has them; no secret, since the cluster shows them."""
SECONDS_TO_CONNECT = 5.0
"""How long the head of a cluster may take to accept a connection."""


class _Queue(Observer):
    """Puts the events of a run into a queue."""

    def __init__(self, events: "SimpleQueue[Any]") -> None:
        self._events = events

    def receive(self, event: Any) -> None:
        self._events.put(event)


def _task(
    name: str, versions_of_search: Mapping[str, str], runnable: Runnable, work: Work | None, stop: Stop
) -> Iterator[Any]:
    """Run an Experiment or a Command on this machine; yield its events, its result, and what its process printed.

    Raises:
        InvalidInputError: this machine has another device or other versions than the search.

    """
    if reason := why_other_versions(versions_of_search):
        raise InvalidInputError(f"{socket.gethostname()} cannot measure trials of this search: {reason}")
    own_name = device_name(runnable.device)
    if own_name != name:
        raise InvalidInputError(f"all trials of a study run on the same hardware, and {own_name} is not {name}")
    events: SimpleQueue[Any] = SimpleQueue()
    cancelled = threading.Event()

    def run(log_file: Path) -> None:
        try:
            events.put(execute(runnable, log_file, [_Queue(events)], work=work, stop=stop, cancelled=cancelled))
        except Exception as error:
            events.put(error)

    with tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "log.txt"
        thread = threading.Thread(target=run, args=(log_file,))
        thread.start()
        try:
            event = None
            while not isinstance(event, Result):
                with suppress(Empty):  # Ray's cancellation does not wake what waits without a timeout
                    event = events.get(timeout=SECONDS_BETWEEN_POLLS)
                    if isinstance(event, Exception):
                        raise event
                    yield event
            log = log_file.read_text(errors="replace") if log_file.exists() else ""
        finally:
            cancelled.set()
            thread.join()
    yield log  # the driver may end this process once it has it


def run_task(
    remote: Callable[..., Any],
    runnable: Runnable,
    log_file: Path,
    observers: Sequence[Observer] = (),
    *,
    work: Work | None = None,
    stop: Stop = never_stop,
    cancelled: threading.Event | None = None,
) -> Result:
    """Run an Experiment or a Command as one task, which `remote` starts, and return the result.

    `log_file` has what the process printed, and the observers receive its events.

    Raises:
        KeyboardInterrupt: `cancelled` was set; the task has been ended.
        WorkerLostError: the task's process or its machine died.

    """
    import ray

    events = remote(runnable, work, stop)
    try:
        while True:
            ready, _ = ray.wait([events], timeout=SECONDS_BETWEEN_POLLS)
            if cancelled is not None and cancelled.is_set():
                raise KeyboardInterrupt
            if not ready:
                continue
            event = ray.get(next(events))
            if isinstance(event, Result):
                log = ray.get(next(events))
                break
            for observer in observers:
                observer.receive(event)
    except ray.exceptions.RayTaskError as error:  # what the task itself raised
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except (ray.exceptions.RayError, StopIteration) as error:
        raise WorkerLostError(f"the process of the task died: {first_line(error)}") from error
    except BaseException:  # Ctrl-C, or an observer's error: nobody would receive what the task sends
        ray.cancel(events)
        if not ray.wait([events.completed()], timeout=SECONDS_TO_END)[0]:
            ray.cancel(events, force=True)
        raise
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_file.write_text(log)
    return event


@contextmanager
def ray_executors(
    address: str | None, device: torch.device, num_workers: int | None, num_devices: int
) -> Iterator[list[Execute]]:
    """Join the Ray cluster at `address`, or start one on this machine, and yield an executor for each worker.

    None workers stand for as many as the GPUs of the cluster allow, or one on a CPU. A task runs on one machine: with
    `num_devices` GPUs and a share of the cores, or on a CPU with as many cores as leave room for all workers. There
    torch uses so many threads in this process as well, as with several workers on this machine.

    Raises:
        InvalidInputError: Ray is not installed, the cluster cannot be reached, or it has too few GPUs or cores.

    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            "executor=ray needs the package ray, which is not installed; pip install '.[ray]' in the checkout, or set "
            "executor=local"
        ) from error
    _start(ray, address)
    is_cuda = device.type == "cuda"
    try:
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        num_cores = [int(one.get("CPU", 0)) for one in machines]
        needed = (f"{num_devices} GPUs of one machine" if num_devices > 1 else "a GPU") if is_cuda else "a CPU"
        capacity = [int(one.get("GPU", 0)) // num_devices for one in machines] if is_cuda else num_cores
        available = sum(capacity)
        num_workers = num_workers or (max(1, available) if is_cuda else 1)
        if num_workers > available:
            fewer = f"set workers to {available} or less, or " if available else ""
            raise InvalidInputError(
                f"each worker needs {needed} of its own, and the cluster has enough for {available} of {num_workers}; "
                f"{fewer}add machines to the cluster"
            )
        if is_cuda:
            num_cpus = min(cores // count for cores, count in zip(num_cores, capacity, strict=True) if count)
        else:
            num_cpus = _largest_share(num_cores, num_workers)
            if "OMP_NUM_THREADS" not in os.environ:  # Ray sets it to num_cpus in the processes of tasks
                torch.set_num_threads(num_cpus)
        resources = {"num_cpus": num_cpus, "num_gpus": num_devices if is_cuda else 0}
        remote = ray.remote(num_returns="streaming", max_retries=0, **resources)(_task).remote
        yield [partial(run_task, partial(remote, device_name(device), versions()))] * num_workers
    finally:
        ray.shutdown()


def _largest_share(num_cores: Sequence[int], num_workers: int) -> int:
    """Return the most cores that each of so many workers can have, all of them on one of these machines."""
    shares = range(max(num_cores), 0, -1)
    return next(share for share in shares if sum(cores // share for cores in num_cores) >= num_workers)


def _start(ray: Any, address: str | None) -> None:
    """Connect this process to a cluster; one of its own has no dashboard and is reached from this machine alone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    variables: Mapping[str, str] = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    own = {"include_dashboard": False} if address is None else {"address": address}
    try:
        _check_port(address)
        ray.init(log_to_driver=False, logging_level="error", runtime_env={"env_vars": dict(variables)}, **own)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise InvalidInputError(
            f"the Ray cluster must be reachable, and {address or 'one on this machine'} is not ({first_line(error)}); "
            "start it with: ray start --head, or leave ray_address out to start one on this machine; if it asks for a "
            "token, set RAY_AUTH_MODE=token and copy the file ~/.ray/auth_token of its head"
        ) from error


def _check_port(address: str | None) -> None:
    """Raise OSError if nothing listens at an address of the form HOST:PORT, for which Ray would wait for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=SECONDS_TO_CONNECT).close()
