"""Sections that an entry point's YAML adds to its report by name: one file each, with the function `section`."""

import pkgutil
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from pipeline.base.errors import InvalidInputError
from pipeline.training.metrics import Row

if TYPE_CHECKING:
    from pipeline.report.page import Section

LADDER = "ladder"
"""Name of a comparison whose variants are meant to add up."""
NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
"""The sections that there are."""


def check_sections(names: Iterable[str]) -> None:
    """Raise InvalidInputError, with the valid names, if there is no section of a name."""
    for name in names:
        if name not in NAMES:
            raise InvalidInputError(f"no section of a report is called {name!r}; the sections are {', '.join(NAMES)}")


def make_sections(names: Sequence[str], rows: Sequence[Row]) -> list["Section"]:
    """Return these sections of a report of `rows`; one that has nothing to show is left out.

    Raises:
        InvalidInputError: there is no section of a name.

    """
    check_sections(names)
    sections = [import_module(f"{__name__}.{name}").section(rows) for name in names]
    return [section for section in sections if section.tables or section.plots]
