"""The code that finds the answers of a conversation, for files of frameworks that find them in another way."""

import inspect

from pipeline.base.errors import first_line
from pipeline.data._support import chat_template, conversations

IMPORTS = """import datetime
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Message = Mapping[str, Any]
"""
CONSTANTS = ("ANSWERS", "MARKED_ANSWERS", "TODAY", "DAY", "REASONING", "SURROGATE", "PLACEHOLDER")


def finding_of_answers() -> str:
    """Return ChatTemplate as source for the top level of a file; it needs nothing of this package."""
    constants = "\n".join(f"{name} = {getattr(chat_template, name)!r}" for name in CONSTANTS)
    functions = (chat_template._function, chat_template._with_object)
    parts = (first_line, chat_template.UnreadableRowError, *functions, chat_template.ChatTemplate)
    return "\n\n\n".join([IMPORTS + constants, *(inspect.getsource(part).strip() for part in parts)])


def reading_of_messages() -> str:
    """Return the function that reads the messages of a row as source, without types, which need imports."""
    source = inspect.getsource(conversations.messages_of).strip()
    return source.replace("(row: Mapping[str, Any]) -> list[dict[str, Any]]:", "(row):")
