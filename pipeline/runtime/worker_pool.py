"""Processes that work on many things side by side: each takes the next task as soon as it is done with one."""

import contextlib
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from traceback import format_exception
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from pipeline.base.errors import first_line
from pipeline.runtime.fork_server import CONTEXT, has_server, loaded, without_main


class WorkerError(RuntimeError):
    """A process of a crew ended in the middle of its work, or with an error that cannot be sent."""


@dataclass(frozen=True)
class Failure:
    """An error on its way from one process to another."""

    pickled: bytes | None
    """None where it cannot be."""
    words: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return how an error is sent."""
        try:
            pickled = pickle.dumps(error)
        except Exception:  # whatever it holds raises
            pickled = None
        return cls(pickled, f"{type(error).__name__}: {first_line(error)}", "".join(format_exception(error)))

    @property
    def error(self) -> Exception:
        """The error with its traceback as a note; one that does not survive the way, by its name and words."""
        try:
            error = pickle.loads(self.pickled or b"")  # noqa: S301  our own
            survived = isinstance(error, Exception) and f"{type(error).__name__}: {first_line(error)}" == self.words
        except Exception:  # whatever its constructor, or its module, raises
            survived = False
        error = error if survived else WorkerError(self.words)
        error.add_note(self.traceback)
        return error


Task = TypeVar("Task")
Done = TypeVar("Done")


class WorkerPool(Generic[Task, Done]):
    """Processes that do one kind of work until they are dismissed, which ends them at once."""

    def __init__(self, work: Callable[[Task], Done], num_processes: int) -> None:
        self._members: dict[Connection, BaseProcess] = {}
        for _ in range(num_processes):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(work, theirs), daemon=True)
            with without_main():
                process.start()
            theirs.close()
            self._members[ours] = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._members.values():
            process.kill()
        for connection, process in self._members.items():
            process.join()
            connection.close()

    def do(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Done]]:
        """Yield the number of each task and its result, as they are done; the tasks are begun in their order.

        Raises:
            Exception: as the work does.
            CrewError: a process has ended, or its error cannot be sent.

        """
        waiting = iter(enumerate(tasks))
        busy: dict[Connection, int] = {}
        for connection, (number, task) in zip(self._members, waiting, strict=False):
            self._ask(connection, task)
            busy[connection] = number
        while busy:
            for connection in cast(list[Connection], wait(list(busy))):
                done = self._hear(connection)
                number = busy.pop(connection)
                following = next(waiting, None)
                if following is not None:
                    busy[connection], task = following
                    self._ask(connection, task)
                yield number, done

    def _ask(self, connection: Connection, task: Task) -> None:
        try:
            connection.send(task)
        except OSError as error:
            raise self._end_of(connection) from error

    def _hear(self, connection: Connection) -> Done:
        try:
            done = connection.recv()
        except (EOFError, OSError) as error:
            raise self._end_of(connection) from error
        if isinstance(done, Failure):
            raise done.error
        return cast(Done, done)

    def _end_of(self, connection: Connection) -> WorkerError:
        process = self._members[connection]
        process.join()
        return WorkerError(f"a process ended before its work did, exit code {process.exitcode}")


def run_in_worker(work: Callable[[Task], Done], task: Task) -> Done:
    """Return what `work` makes of a task: in a process forked from the server, where it was started, else here.

    Raises:
        Exception: as the work does.
        CrewError: the process has ended, or its error cannot be sent.

    """
    if not has_server():
        return work(task)
    with WorkerPool(work, 1) as pool:
        [(_, done)] = pool.do([task])
    return done


def _serve(work: Callable[[Any], Any], connection: Connection) -> None:
    """Be a process of the crew, until nobody has a task any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    loaded()
    with contextlib.suppress(EOFError, ConnectionError):  # when the process that had tasks is gone
        while True:
            task = connection.recv()
            try:
                connection.send(work(task))
            except Exception as error:  # whatever the work raises, or its result when it is pickled
                connection.send(Failure.of(error))
