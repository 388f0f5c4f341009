"""How far a long piece of work is, for the command that shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Listener:
    """Receives how far work is, and shows nothing: the listener where no command has set another."""

    def started(self, text: str, total: int) -> None:
        """Receive what is done, and its amount."""

    def advanced(self, amount: int) -> None:
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
def progress(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """Report `total` of work as started and ended; give the function that reports how much more of it is done."""
    listener = _LISTENER.get()
    listener.started(text, total)
    try:
        yield listener.advanced
    finally:
        listener.ended()
