"""The fork server: clean child processes that have torch and transformers imported already."""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from types import ModuleType
from unittest.mock import patch

from pipeline.runtime.signals import deferred_signals

CONTEXT = multiprocessing.get_context("forkserver")
"""Start method of all child processes; they inherit no database connection and no thread of this process."""
SERVED = [
    "fitproof",  # finds the package pipeline, which a folder of that name in the current one must not replace
    "pipeline.runtime.preload",
]
"""Modules that the server imports itself; the second one imports PRELOADED."""
PRELOADED = [
    "pipeline.training.loop",
    "pipeline.prediction.predict",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.masking_utils",
]
"""Modules that training and prediction need, in the order in which they are imported."""
LOOKS_WITHOUT_CONTEXT = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable with which torch asks NVML for GPUs: else no process that is forked afterwards may use them."""
CONTEXT.set_forkserver_preload(SERVED)
_STARTING = threading.Lock()
"""Held while a thread starts processes."""


def start_server() -> None:
    """Start the fork server, which imports torch and transformers in the background.

    Ctrl-C reaches the whole process group and is handled by this process: the server inherits a mask that blocks it.
    """
    resource_tracker.ensure_running()  # if the server started it, it would remove the mask
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def preload(modules: Iterable[str] = PRELOADED) -> None:
    """Import modules for the processes that this one forks; they import themselves what needs a GPU to be imported.

    An import that made a CUDA context, as torchao's does, would leave forked processes without any.
    """
    import torch  # not before: a command starts the server while it imports torch itself

    def refuse() -> None:
        raise ImportError("a process from which others are forked has no CUDA context")

    looks = {LOOKS_WITHOUT_CONTEXT: "1"}
    with patch.object(torch._C, "_cuda_init", refuse, create=True), patch.dict(os.environ, looks):
        for name in modules:
            with contextlib.suppress(Exception):  # it shows where the module is used
                import_module(name)


def stop_server() -> None:
    """End the fork server if there is one; it would go on importing after the end of this process."""
    pid = server_pid()
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def server_pid() -> int | None:
    """Return the fork server's process id, which multiprocessing keeps in a private attribute, or None."""
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return pid


def begin_child(variables: Mapping[str, str]) -> None:
    """Take the parent's environment variables, leave Ctrl-C to it, and end when it ends.

    The parent may have changed `variables` since the server started. Ctrl-C reaches all processes of a terminal. The
    garbage collector is enabled, but excludes what the server has imported.
    """
    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    gc.enable()
    end_with_parent()


def end_with_parent() -> None:
    """End this process once its parent has: one that hangs would stay behind, since nothing tells it."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None  # this process is a child
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def loading(module: str) -> Iterator[None]:
    """Import a module in a thread while the body waits for other processes; errors show when it is imported again."""

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
def starting_processes() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again, and Ctrl-C from leaving a process half started."""
    with _STARTING:
        start_server()  # where nobody has: multiprocessing would start it without the mask
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            with deferred_signals():
                yield
        finally:
            sys.modules["__main__"] = main
