"""The process on a simulated card from which a clean process is forked for every request.

    python card_host.py DESCRIPTOR PROCESSES

It has imported torch and transformers, and has no CUDA context: the forked processes make theirs. Requests and outcomes
pass through the connection DESCRIPTOR as (number, content), both pickled apart, so that the code of a request is
imported by its own process alone; a request without content ends the one of that number.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import sys
from collections import OrderedDict
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe, wait

import torch

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.runtime.fork_server import preload

MAKES_CARD = ("LD_PRELOAD", "PYTHONPATH", "TRITON_LIBCUDA_PATH", "CUDA_VISIBLE_DEVICES", "SIMULATED_CARD_REPORT")
"""Variables that this process was started with, and that every process on a simulated card keeps."""
LEARNED = ("torch.", "transformers.")
"""Beginnings of the names of modules that this process imports as soon as a forked one needed them."""


class CardHost:
    """Serves requests, a number of them at a time, until its connection ends."""

    def __init__(self, connection: Connection, num_processes: int) -> None:
        self._connection, self._num_processes = connection, num_processes
        self._waiting: OrderedDict[int, bytes] = OrderedDict()
        self._running: dict[Connection, tuple[int, int]] = {}
        """The number of a request and the process that serves it, by the connection from which its outcome comes."""
        self._seen = {*sys.modules}

    def serve(self) -> None:
        """Serve until the parent has closed the connection or has ended, or SIGTERM; then end what still runs."""
        try:
            while True:
                for ready in wait([self._connection, *self._running]):
                    if ready is self._connection:
                        self._receive()
                    else:
                        self._finish(ready)  # type: ignore[arg-type]
                while self._waiting and len(self._running) < self._num_processes:
                    self._start(*self._waiting.popitem(last=False))
        except (EOFError, ConnectionError):
            pass
        finally:
            for _, pid in self._running.values():
                os.kill(pid, signal.SIGKILL)

    def _receive(self) -> None:
        number, request = self._connection.recv()
        if request is not None:
            self._waiting[number] = request
            return
        self._waiting.pop(number, None)
        for running, pid in self._running.values():
            if running == number:
                os.kill(pid, signal.SIGKILL)

    def _start(self, number: int, request: bytes) -> None:
        reader, writer = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._connection.close()
            reader.close()
            with contextlib.suppress(BaseException):
                imported = {*sys.modules}
                outcome = _outcome_of(request)
                writer.send((outcome, [name for name in sys.modules if name not in imported]))
            os._exit(0)
        writer.close()
        self._running[reader] = (number, pid)

    def _finish(self, reader: Connection) -> None:
        number, pid = self._running.pop(reader)
        try:
            outcome, imported = reader.recv()
        except (EOFError, OSError):  # it was ended, perhaps while it was sending
            outcome, imported = None, []
        reader.close()
        _, status = os.waitpid(pid, 0)
        if outcome is None:
            outcome = pickle.dumps(RuntimeError(f"its process ended with {os.waitstatus_to_exitcode(status)}"))
        self._connection.send((number, outcome))
        self._learn(imported)

    def _learn(self, names: list[str]) -> None:
        """Import what a forked process had to, so that the following ones have it, where that needs no GPU."""
        preload(name for name in names if name.startswith(LEARNED) and name not in self._seen)
        self._seen.update(names)
        gc.freeze()  # what is imported is no garbage: forked processes neither look through it nor copy its pages


def _outcome_of(request: bytes) -> bytes:
    """Return what a function returns, or its error, pickled; it was sent with what its process is to be like."""
    try:
        variables, folder, paths, call = pickle.loads(request)  # noqa: S301  # the parent's own
        _become(variables)
        os.chdir(folder)
        sys.path += [path for path in paths if path not in sys.path]
        function, argument = pickle.loads(call)  # noqa: S301
        return pickle.dumps(function(argument))
    except InvalidInputError as error:
        return pickle.dumps(error)
    except BaseException as error:  # of any kind: it may not be picklable
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {first_line(error)}"))


def _become(variables: Mapping[str, str]) -> None:
    """Give this process its environment, but for what makes its card, which is then what the variables say."""
    own = {name: value for name, value in os.environ.items() if name in MAKES_CARD}
    os.environ.clear()
    os.environ.update({**variables, **own})
    ctypes.CDLL(None).card_read_environment()
    if "SIMULATED_CARD_RANK" in variables:
        from pipeline.simulation.hook import ranks

        ranks.set_rank()
        ranks.imagine_others(torch)
        torch.distributed.init_process_group()


def main() -> None:
    """Import what trainings need, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    connection = Connection(int(sys.argv[1]))
    preload()
    from pipeline.base.files import cache_folder
    from pipeline.prediction.prediction_cache import code_digest, remove_least_used

    code_digest()  # which every request needs, and the processes that are forked then have
    with contextlib.suppress(InvalidInputError):  # which these say, if they need the folder
        remove_least_used(cache_folder())  # once for all of them
    gc.freeze()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    CardHost(connection, int(sys.argv[2])).serve()


if __name__ == "__main__":
    main()
