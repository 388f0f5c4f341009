"""How far a long piece of work is, for the command that shows it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Advance(Protocol):
    """Reports how much more of the work is done, and what else is to be said of it."""

    def __call__(self, amount: int, detail: str = "") -> None:
        """Report it."""


class Listener:
    """Receives how far work is, and shows nothing: the listener where no command has set another.

    Work may be part of other work: what is started last advances and ends first.
    """

    def started(self, text: str, total: int) -> None:
        """Receive what is done, and its amount; 0 where that is not known."""

    def advanced(self, amount: int, detail: str = "") -> None:
        """Receive how much more of it is done."""

    def ended(self) -> None:
        """Receive that it is over, whether all of it is done or not."""


_LISTENER: ContextVar[Listener] = ContextVar("listener", default=Listener())  # noqa: B039  it has no state


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let `listener` receive the progress of what is done in the context."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def progress(text: str, total: int = 0) -> Iterator[Advance]:
    """Report `total` of work as started and ended; give the function that reports how much more of it is done."""
    listener = _LISTENER.get()
    listener.started(text, total)
    try:
        yield listener.advanced
    finally:
        listener.ended()
