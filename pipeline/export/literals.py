"""Values as source of Python."""

import json
from collections.abc import Mapping

LINE_LENGTH = 110


def literal(value: object) -> str:
    """Return a value as Python code; a long dictionary spans several lines."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        items = [f"{literal(name)}: {literal(part)}" for name, part in value.items()]
        line = ", ".join(items)
        return f"{{{line}}}" if len(line) <= LINE_LENGTH else "".join(["{\n", *(f"    {i},\n" for i in items), "}"])
    if isinstance(value, list):
        return f"[{', '.join(literal(part) for part in value)}]"
    return repr(value)
