"""Fresh processes: forked from a server that has loaded what they need, and nothing of who asks for them."""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from types import ModuleType

CONTEXT = multiprocessing.get_context("forkserver")
"""Its processes inherit nothing of this one: no connection to a database, no thread."""
LOADED = [
    "pipeline.runtime.preload",
    "pipeline.training.loop",
    "pipeline.prediction.predict",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.masking_utils",
]
"""What training and prediction need, by the names of modules, in the order in which they are loaded."""
CONTEXT.set_forkserver_preload(LOADED)


def start_server() -> None:
    """Begin to load torch and transformers in the process that the runs are forked from, without waiting for it.

    Ctrl-C, which reaches the whole group, is this process's to answer: the server inherits a mask that blocks it.
    """
    resource_tracker.ensure_running()  # where the server did it, it would take the mask away
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def has_server() -> bool:
    """Whether that process has been started, and not ended by stop_server()."""
    return _server_number() is not None


def stop_server() -> None:
    """End the server, if there is one; it would go on loading after this process's end."""
    number = _server_number()
    if number is not None:
        os.kill(number, signal.SIGKILL)
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _server_number() -> int | None:
    """Return the number of the process, which multiprocessing keeps to itself."""
    number: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return number


def loaded() -> None:
    """Look for garbage from here on, in a process that was forked, but never in what has been loaded."""
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def loading(module: str) -> Iterator[None]:
    """Load a module while what is done inside waits for other processes; whoever imports it then learns how it went."""

    def load() -> None:
        with contextlib.suppress(Exception):
            import_module(module)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Keep multiprocessing from running the script of whoever calls us once more in a fresh process."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
