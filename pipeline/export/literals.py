"""Values as source: of Python and of YAML."""

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


def yaml_literal(value: object) -> str:
    """Return a value as YAML in one line; YAML 1.1 reads a number with an exponent only if it has a point."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {yaml_literal(part)}' for name, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(yaml_literal(part) for part in value)}]"
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text
