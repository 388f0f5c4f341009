"""One framework, and the files that make it train the same."""

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.export.facts import Facts, literal


class Target(ABC):
    """One framework; its files and what is to be known about them."""

    purpose: ClassVar[str]
    """What its files are for, in a sentence."""

    @abstractmethod
    def files(self, facts: Facts) -> dict[str, str]:
        """Return the texts by file name; none where the framework cannot train this."""

    @abstractmethod
    def notes(self, facts: Facts) -> list[str]:
        """Return what the framework does otherwise, or is to be told elsewhere, a sentence each."""


def render(template: str, facts: Facts, **more: Any) -> str:
    """Return a template of this package, filled in."""
    return _environment().get_template(template).render(facts=facts, **more)


def uneven_note(facts: Facts, remedy: str) -> list[str]:
    """Return what to know where micro-batches differ in their number of targets, as those with padding do."""
    if not facts.padded or facts.accumulation_steps == 1:
        return []
    return [f"It averages micro-batches, which with padding hold different numbers of targets: {remedy}."]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("pipeline.export"),
        autoescape=False,  # noqa: S701  what it writes is code, not HTML
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["literal"] = literal
    return environment
