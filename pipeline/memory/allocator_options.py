"""The options of torch's caching allocator, which environment variables hold."""

import os
from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Torch reads the first one that is set; older releases know the second one alone, newer ones warn of it."""
OPTION = "expandable_segments"
ENABLED = f"{OPTION}:True"
EXPANDABLE_SEGMENTS = f"{VARIABLES[1]}={ENABLED}"
"""What lets the allocator grow its segments, as a user writes it who has set no other option."""


def options_in(variables: Mapping[str, str] = os.environ) -> str:
    """Return the options that these environment variables give; `default` if none."""
    return variables.get(_decides(variables) or "", "default")


def are_segments_decided() -> bool:
    """Whether this process's environment says whether segments are expandable."""
    return any(OPTION in os.environ.get(name, "") for name in VARIABLES)


def with_expandable_segments(variables: Mapping[str, str] = os.environ, new: str = VARIABLES[1]) -> dict[str, str]:
    """Return the variable that adds expandable segments to the options of these environment variables.

    If none is set it is `new`, by default the one that the torch of any command knows.
    """
    variable = _decides(variables) or new
    given = [option.strip() for option in variables.get(variable, "").split(",") if option.strip()]
    others = [option for option in given if option.partition(":")[0].strip() != OPTION]
    return {variable: ",".join([*others, ENABLED])}


def _decides(variables: Mapping[str, str]) -> str | None:
    return next((name for name in VARIABLES if name in variables), None)
