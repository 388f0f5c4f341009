"""Values of rows: text, JSON text, and nulls."""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.data._support.chat_template import UnreadableRowError


def parsed(row: Any) -> Mapping[str, Any]:
    """Return a row, which may be JSON text, without nulls; a list of messages is one with the field turns.

    Raises:
        UnreadableRowError: it is neither.

    """
    try:
        row = without_nulls(json.loads(row) if isinstance(row, str) else row)
    except ValueError as error:
        raise UnreadableRowError("are not JSON", getattr(error, "msg", str(error))) from error
    except RecursionError as error:
        raise UnreadableRowError("are nested too deeply") from error
    if isinstance(row, list) and row and all(isinstance(turn, Mapping) for turn in row):
        return {"turns": row}
    if not isinstance(row, Mapping):
        raise UnreadableRowError("are neither objects with names nor lists of messages", type_name(row))
    return row


def without_nulls(value: Any) -> Any:
    """Return a value without what is null in its objects, which Parquet adds where other rows have a field."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def decoded(value: Any) -> Any:
    """Return a value that a field may also have as JSON text; text that is none is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        return without_nulls(json.loads(value))
    except (ValueError, RecursionError):
        return value


def checked_text(value: Any) -> str:
    """Return text of a row.

    Raises:
        UnreadableRowError: it is no text, or half of a character is in it.

    """
    if not isinstance(value, str):
        raise UnreadableRowError("have a message whose role or content is not text", type_name(value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnreadableRowError(
            "have half of a character in their text (a lone surrogate)", f"{value[error.start]!r}"
        ) from error
    return value


def type_name(value: Any) -> str:
    """Return the name of a value's type, for a refusal."""
    return "none" if value is None else type(value).__name__
