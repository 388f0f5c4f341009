"""The field of rows that holds their text."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipeline.base.errors import InvalidInputError, printable


class TextField:
    """A field of rows, whose values are text or null, and how many of them are null."""

    def __init__(self, name: str, setting: str, chat: str) -> None:
        """Take the field's name, the setting that has it, and the setting with which corpus=chat reads the rows."""
        self._name, self._setting, self._chat = name, setting, chat
        self.begin()

    def begin(self) -> None:
        """Count from the start: all rows are read again."""
        self._num_rows = self._num_without = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence about the rows without text, if there are some."""
        left_out = f"{self._num_without:,} of {self._num_rows:,} rows are left out: their field {self._name} is null"
        return (left_out,) if self._num_without else ()

    def texts(self, rows: Iterable[tuple[str, Any]], source: str) -> Iterator[str]:
        """Yield the text of each row that has some.

        Raises:
            InvalidInputError: a row is no object, no row has the field, or its value is no text.

        """
        names: dict[str, None] = {}
        is_found, is_empty = False, True
        for place, given in rows:
            row = self._object(given, place, source)
            self._num_rows += 1
            is_empty, is_found = False, is_found or self._name in row
            if row.get(self._name) is None:
                self._num_without += 1
                names.update(dict.fromkeys(row))
            else:
                yield self._checked(row[self._name], place, source)
        if not is_found and not is_empty:
            is_chat = {"messages", "conversations"} & {*names}
            raise InvalidInputError(
                f"every row of {source} must have the text field {self._name!r}, and none has it (its fields: "
                f"{printable(', '.join(names)) or 'none'}); set {self._setting}{self._of_chat() if is_chat else ''}"
            )

    def _object(self, row: Any, place: str, source: str) -> Mapping[str, Any]:
        if isinstance(row, str):
            try:
                row = json.loads(row)
            except (ValueError, RecursionError) as error:
                raise InvalidInputError(
                    f"every line of {source} must be JSON, and {place} is not ({getattr(error, 'msg', error)}); fix or "
                    "remove it"
                ) from error
        if not isinstance(row, Mapping):
            raise InvalidInputError(
                f"every row of {source} must have the text field {self._name!r}, and {place} is no object with names; "
                "fix or remove it"
            )
        return row

    def _checked(self, value: Any, place: str, source: str) -> str:
        if not isinstance(value, str):
            is_chat = isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value)
            raise InvalidInputError(
                f"every row of {source} must have the text field {self._name!r}, and in {place} it is no text but "
                f"{type(value).__name__}; set {self._setting}{self._of_chat() if is_chat else ''}"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"the text of {source} must be whole characters, and in {place} {value[error.start]!r} is half of one "
                "(a lone surrogate); fix or remove it"
            ) from error
        return value

    def _of_chat(self) -> str:
        return f", or read conversations: fitproof main --corpus chat {self._chat}"
