"""Ctrl-C and SIGTERM: before a job has started the command exits at once, afterwards in an orderly way."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import NoReturn

import psutil

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells define it: 128 + SIGINT."""
STOPS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and the signal that `mlflow run` sends when it receives Ctrl-C."""
SHOW_CURSOR = b"\x1b[?25h\n"
"""Escape sequence that shows the cursor again after a progress line."""
SECONDS_TO_RETURN = 0.1
"""How long a callback may take to return to the code that it interrupted."""


def exit_on_signal() -> None:
    """Exit at once on a signal; an exception could be swallowed by a module that is being imported."""
    for kind in STOPS:
        signal.signal(kind, _leave)


def interrupt_on_signal() -> None:
    """Turn a signal into KeyboardInterrupt from here on, since a job has started; only in a command."""
    if signal.getsignal(signal.SIGINT) is _leave:
        for kind in STOPS:
            signal.signal(kind, _interrupt)
        sys.unraisablehook = _interrupt_again


def ignore_signals() -> None:
    """Ignore signals while the command ends."""
    for kind in STOPS:
        signal.signal(kind, signal.SIG_IGN)


def end_process(code: int) -> NoReturn:
    """End this process as at the end of a script, but do not free what was imported.

    That takes a second, and C++ libraries may then print what they take for leaks.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Let the body finish before the first signal takes effect; a second one takes effect at once."""
    if threading.current_thread() is not threading.main_thread():  # signals are handled in the main thread
        yield
        return
    handlers = {kind: handler for kind in STOPS if callable(handler := signal.getsignal(kind))}
    received: list[int] = []

    def restore() -> None:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)

    def defer(kind: int, _: object) -> None:
        received.append(kind)
        restore()

    for kind in handlers:
        signal.signal(kind, defer)
    try:
        yield
    finally:
        restore()
        if received:
            signal.raise_signal(received[0])


def _leave(*_: object) -> None:
    ignore_signals()
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # ends by itself; the exit functions need it
    for process in psutil.Process().children(recursive=True):
        if process.pid != tracker:
            process.kill()
    stdout, stderr = 1, 2  # file descriptors: the Python objects may be in the middle of a write
    if os.isatty(stdout):
        os.write(stdout, SHOW_CURSOR)
    os.write(stderr, b"interrupted: nothing was started\n")
    atexit._run_exitfuncs()
    os._exit(INTERRUPTED)


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt; ignore the SIGTERM that `mlflow run` sends after Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise KeyboardInterrupt


def _interrupt_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Interrupt again where nobody saw it: Python ignores what a weak reference's callback or a finalizer raises."""
    if ignored.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(ignored)
        return
    again = threading.Timer(SECONDS_TO_RETURN, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()
