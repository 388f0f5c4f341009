"""The code that finds the answers of a conversation, for files of frameworks that find them in another way."""

import inspect

from pipeline.base import chat_template
from pipeline.base.errors import first_line

IMPORTS = """import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Message = Mapping[str, Any]
"""
CONSTANTS = ("ANSWERS", "MARKED_ANSWERS", "TODAY", "DAY", "PLACEHOLDER")


def finding_of_answers() -> str:
    """Return ChatTemplate as source for the top level of a file; it needs nothing of this package."""
    constants = "\n".join(f"{name} = {getattr(chat_template, name)!r}" for name in CONSTANTS)
    parts = (first_line, chat_template.UnreadableRowError, chat_template.ChatTemplate)
    return "\n\n\n".join([IMPORTS + constants, *(inspect.getsource(part).strip() for part in parts)])
