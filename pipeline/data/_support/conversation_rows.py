"""Rows of conversations as tokens, with what was read of them, what was not, and which rows are none."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import numpy as np

from pipeline.base.errors import InvalidInputError, printable
from pipeline.data._support.chat_template import ChatTemplate, Message, UnreadableRowError
from pipeline.data._support.conversations import Conversation, read_conversation, read_pair
from pipeline.data._support.shapes import Reading
from pipeline.data._support.tokenizer import Encoded, joined

KNOWN = "messages, prompt and completion, or another shape of docs/data.md"


@dataclass(kw_only=True)
class Found:
    """What is known of the rows that were read so far."""

    shapes: Counter[str] = field(default_factory=Counter)
    """The number of rows of each shape."""
    unread: Counter[str] = field(default_factory=Counter)
    """The number of rows whose field of this name was not read."""
    num_converted: int = 0
    """Rows that are not as the chat template takes them."""
    refused: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    """By reason and remedy: the number of rows without a conversation, and the place of the first with its detail."""

    def add(self, conversation: Conversation, unread: Iterable[str]) -> None:
        """Count a row that was read."""
        self.shapes[conversation.shape] += 1
        self.unread.update(map(printable, {*conversation.unread, *unread}))
        self.num_converted += not conversation.is_plain

    def refuse(self, place: str, error: UnreadableRowError) -> None:
        """Count a row that has no conversation."""
        first = f"{place} first" + (f" ({shorten(printable(error.detail), 100)})" if error.detail else "")
        self.refused.setdefault((error.reason, error.remedy), [0, first])[0] += 1

    def update(self, other: "Found") -> None:
        """Add what is known of the rows after these."""
        self.shapes.update(other.shapes)
        self.unread.update(other.unread)
        self.num_converted += other.num_converted
        for reason, (count, first) in other.refused.items():
            self.refused.setdefault(reason, [0, first])[0] += count

    @property
    def num_refused(self) -> int:
        """Rows without a conversation."""
        return sum(count for count, _ in self.refused.values())

    @property
    def reasons(self) -> str:
        """Why rows have no conversation, with their number."""
        return "; ".join(f"{count} {reason}, {first}" for (reason, _), (count, first) in self.refused.items())

    def check(self, source: str, words: str, *, leave_out: bool) -> None:
        """Raise InvalidInputError if there are no conversations or, unless they are left out, rows without one.

        `words` are the settings that name the source, for the command that reads such rows.
        """
        num_read = self.shapes.total()
        if self.refused and not (leave_out and num_read):
            remedies = dict.fromkeys(remedy for _, remedy in self.refused if remedy)
            text = words.replace("--corpus chat --chat.name", "--corpus hub --hub.name").replace(
                "--corpus chat --chat.path", "--corpus text_files --text_files.path"
            )
            hints = "".join(f"; {remedy.format(chat=words, text=text)}" for remedy in remedies)
            others = ", or leave them out by chat.unreadable_rows=leave_out" if num_read else ""
            raise InvalidInputError(
                f"every row of {source} must be a conversation with an answer ({KNOWN}), and {self.num_refused} of "
                f"{self.num_refused + num_read} are not: {self.reasons}{hints}; fix or remove them{others}"
            )
        if not num_read:
            raise InvalidInputError(
                f"a corpus needs conversations, and {source} has none; name another file or dataset"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what was read as what, what was not read, and what is left out, a sentence each."""
        shapes = ", ".join(f"{count:,} row{'s' * (count > 1)} as {shape}" for shape, count in self.shapes.most_common())
        unread = ", ".join(name for name, _ in self.unread.most_common()) or "none"
        notes = [f"{shapes}; fields that were not read: {shorten(unread, 300)}"]
        if self.refused:
            notes.append(
                f"{self.num_refused:,} row{'s are' if self.num_refused > 1 else ' is'} left out: {self.reasons}"
            )
        return tuple(notes)


@dataclass(frozen=True, kw_only=True)
class ConversationEncoder:
    """Conversations as token ids, by a chat template."""

    template: ChatTemplate
    reading: Reading

    def __call__(self, rows: Sequence[tuple[str, Any]]) -> Encoded:
        """Return rows, each with its place, as token ids."""
        found, documents, targets = Found(), [], []
        for place, row in rows:
            try:
                conversations = _conversations(row, self.reading)
                encoded = [
                    self.template.encode(each.messages, each.tools, each.template_arguments, each.untrained)
                    for each in conversations
                ]
            except UnreadableRowError as error:
                found.refuse(place, error)
                continue
            read = conversations[0]
            found.add(read, self.template.unread(read.messages, read.tools, read.template_arguments))
            documents += [ids for ids, _ in encoded]
            targets += [is_target for _, is_target in encoded]
        lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
        return Encoded(tokens=joined(documents), lengths=lengths, is_target=joined(targets, np.bool_), found=found)


def all_messages(
    rows: Iterable[tuple[str, Any]], reading: Reading, check: Callable[[Found], None]
) -> Iterator[tuple[Message, ...]]:
    """Yield the messages of each row that has some; `check` receives what was found when all are read."""
    found = Found()
    for place, row in rows:
        try:
            conversations = _conversations(row, reading)
        except UnreadableRowError as error:
            found.refuse(place, error)
            continue
        found.shapes[conversations[0].shape] += 1
        yield from (each.messages for each in conversations)
    check(found)


def _conversations(row: Any, reading: Reading) -> tuple[Conversation, ...]:
    """Return the conversations of a row: two of one that is to be a preference pair."""
    return read_pair(row, reading) if reading.needs_pairs else (read_conversation(row, reading),)
