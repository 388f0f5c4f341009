"""The interface of an export target: one framework and its files."""

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.export.facts import Facts
from pipeline.export.literals import literal


class Target(ABC):
    """One framework: its files, and notes about them."""

    purpose: ClassVar[str]
    """How its files are used, in a sentence."""
    takes_code: ClassVar[bool] = True
    """Whether its files can hold Python code."""

    @abstractmethod
    def files(self, facts: Facts) -> dict[str, str]:
        """Return the texts by file name; none where the framework cannot train this model."""

    @abstractmethod
    def differences(self, facts: Facts) -> list[str]:
        """Return what the framework does differently, or needs to be set elsewhere, a sentence each."""

    def notes(self, facts: Facts) -> list[str]:
        """Return what a user of the files needs to know, a sentence each; what is missing from them comes first."""
        return [*facts.missing, *self.other_notes(facts)]

    def other_notes(self, facts: Facts) -> list[str]:
        """Return the same without what is missing, which stands at the top of every file."""
        return [*self.differences(facts), *(note for each in facts.exported for note in each.notes)]


def render(template: str, facts: Facts, **more: Any) -> str:
    """Return a rendered template of pipeline/export/templates/."""
    return _environment().get_template(template).render(facts=facts, **more)


def uneven_note(facts: Facts, what_to_do: str) -> list[str]:
    """Return a note for micro-batches that differ in their number of targets, and what to do with their loss."""
    pads = facts.is_padded or facts.packs_documents
    if not (pads or facts.masked) or facts.accumulation_steps * facts.world_size == 1:
        return []
    cause = "padding" if pads else "tokens that are no targets"
    factors = "accumulation steps" if facts.world_size == 1 else "accumulation steps x processes"
    return [
        f"It averages micro-batches, which with {cause} have different numbers of targets: {what_to_do} the summed "
        f"loss x {factors} / targets of the whole window."
    ]


def processes_note(facts: Facts, command: str) -> list[str]:
    """Return a note for several processes; `command` starts them."""
    if facts.world_size == 1:
        return []
    return [f"{facts.world_size} processes train together: start them with {command}."]


def lengths_note(facts: Facts) -> list[str]:
    """Return a note for micro-batches that the user's own data loader has to make as they were measured."""
    if facts.packs_documents:
        return [documents_note("Micro-batches come from your own data loader: they need")]
    if not facts.lengths_vary:
        return []
    order = "sort the sequences of each optimizer step by length, and " if facts.settings.sequences == "grouped" else ""
    return [
        f"Micro-batches come from your own data loader: {order}pad each to its longest sequence, as measured; with "
        "other padding the losses are the same, memory and time are not."
    ]


def documents_note(beginning: str) -> str:
    """Return a note for data whose documents are kept apart; `beginning` ends with a verb."""
    return (
        f"{beginning} position_ids beside input_ids and labels, which begin at 0 with each document of a sequence, no "
        "attention_mask, and -100 as the label of each document's first token, as read_sequences in train.py makes "
        "them; without, documents attend to those before them, which was not measured."
    )


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
