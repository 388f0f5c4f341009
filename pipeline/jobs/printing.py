"""Text in the terminal: no number is parted from its unit where a line ends, and no note is printed twice."""

import re
import textwrap
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

NO_BREAK = "\u00a0"


def wrapped(text: str, width: int) -> str:
    """Return the text in lines of at most `width`; a number stays beside the word after it, and ± beside its number."""
    joined = re.sub(r"(?<=\d) (?=[^\s\d])|(?<=±) |(?<=\bx) (?=\d)", NO_BREAK, text)
    lines = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in joined.splitlines()]
    return "\n".join(lines).replace(NO_BREAK, " ")


def say(console: Console, text: str, style: str = "") -> None:
    """Print sentences."""
    console.print(Text(wrapped(text, console.width), style), highlight=False, soft_wrap=True)


def say_notes(console: Console, notes: Iterable[str], said: Iterable[str] = ()) -> None:
    """Print each note once, but those that have been `said`."""
    for note in dict.fromkeys(notes):
        if note not in set(said):
            say(console, note, "yellow")
