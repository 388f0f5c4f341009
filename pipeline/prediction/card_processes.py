"""Processes on simulated cards: the parent's side of the host that forks one for every request."""

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from itertools import count
from multiprocessing.connection import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import last_lines
from pipeline.base.processes import num_cores
from pipeline.runtime.fork_server import start_server
from pipeline.simulation.cards import CARDS
from pipeline.simulation.environment import environment

CARD_HOST = Path(__file__).with_name("card_host.py")
"""What the host runs. It imports torch; this module does not, so that the host may start before torch is imported."""
_STARTING = threading.Lock()
"""Held while the host is started, by a thread too."""


class CardProcesses:
    """Calls functions in clean processes on simulated cards, as many at a time as this process may use cores."""

    def __init__(self, python: Path) -> None:
        """Start the host, which imports torch and transformers while this process goes on."""
        self._folder = tempfile.TemporaryDirectory(prefix="fitproof-cards-")
        folder = Path(self._folder.name)
        self._log = folder / "log.txt"
        self._connection, theirs = Pipe()
        self._calls: dict[int, SimpleQueue[tuple[int, bytes | None]]] = {}
        self._sending, self._numbers = threading.RLock(), count(1)
        card = environment(next(iter(CARDS.values())), python=python, report=folder)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, CARD_HOST, str(theirs.fileno()), str(num_cores())],
                env={"OMP_NUM_THREADS": "1", **os.environ, **card},  # one thread for each process that it forks
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        theirs.close()
        self._receiving = threading.Thread(target=self._receive, daemon=True)
        self._receiving.start()
        atexit.register(self.close)

    def call(
        self, function: Callable[[Any], Any], arguments: Sequence[Any], variables: Sequence[Mapping[str, str]]
    ) -> Generator[tuple[int, Any], None, None]:
        """Call a function with each argument, in processes with these variables; yield (number, outcome) as completed.

        An outcome is what it returns, or the error that it raises: InvalidInputError, or RuntimeError for any other.
        Calls that are left when the iterator is closed are ended.

        Raises:
            RuntimeError: the host has ended.

        """
        sent, outcomes = dict[int, int](), SimpleQueue[tuple[int, bytes | None]]()
        requests = [
            pickle.dumps((dict(own), Path.cwd(), _own_paths(), pickle.dumps((function, argument))))
            for argument, own in zip(arguments, variables, strict=True)
        ]
        try:
            for place, request in enumerate(requests):
                number = next(self._numbers)
                sent[number], self._calls[number] = place, outcomes
                self._send((number, request))
            while sent:
                number, outcome = outcomes.get()
                if outcome is None:
                    sent.clear()
                    raise self._ended()
                yield sent.pop(number), pickle.loads(outcome)  # noqa: S301  # from our own process
        finally:
            for number in sent:
                self._calls.pop(number, None)
                self._send((number, None))

    def close(self) -> None:
        """End the host and its processes."""
        self._process.terminate()
        self._process.wait()
        self._receiving.join()
        with self._sending:
            self._connection.close()
        self._folder.cleanup()

    def _receive(self) -> None:
        """Give each outcome to the thread that waits for it, and None to all that wait when the host ends."""
        try:
            while True:
                number, outcome = self._connection.recv()
                outcomes = self._calls.pop(number, None)
                if outcomes is not None:  # else nobody waits any more
                    outcomes.put((number, outcome))
        except (EOFError, ConnectionError):
            pass
        finally:
            for number, outcomes in [*self._calls.items()]:
                outcomes.put((number, None))

    def _send(self, message: object) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:  # the host has ended, or it was closed
            raise self._ended() from error

    def _ended(self) -> RuntimeError:
        *_, last = "no output", *last_lines(self._log)
        return RuntimeError(f"the process on a simulated card has ended: {last}")


def card_processes() -> CardProcesses:
    """Return this process's, whose host is started by the first call.

    Raises:
        InvalidInputError: there is no CUDA build of torch, or the simulated card cannot be made.

    """
    with _STARTING:
        return _card_processes()


@cache
def _card_processes() -> CardProcesses:
    from pipeline.simulation.run import on_cuda_build  # what it needs takes a list of entry points too long

    return CardProcesses(Path(on_cuda_build((sys.executable,), may_install=False)[0]))


def is_of_this_machine(gpu: str) -> bool:
    """Whether what `--gpu` names is a device of this machine, and not a card that may be elsewhere."""
    return gpu in ("auto", "cpu") or gpu.startswith("cuda")


def start_importing(gpu: str = "auto") -> None:
    """Start the process that imports torch and transformers for others, while this one imports torch itself.

    It is the host of processes on simulated cards or, for those of this machine's own device, the fork server. Where a
    card cannot be simulated, nothing starts: whoever needs it says why.
    """
    if is_of_this_machine(gpu):
        start_server()
        return

    def start() -> None:
        with contextlib.suppress(InvalidInputError):
            card_processes()

    threading.Thread(target=start).start()


def _own_paths() -> list[str]:
    """Return where this process finds modules, but for Python's own and installed packages."""
    packages = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return [path for path in sys.path if path and not any(path.startswith(folder) for folder in packages)]
