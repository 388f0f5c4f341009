"""Links between cards by name, with what they carry in one direction: the table in links.csv, or a rate of one's own.

Its column `cards` has the cards that are so connected with the others of their machine; all others are by their PCIe.
Between machines a ring sends through all ports of a machine at once: `8xinfiniband-ndr` is a machine with eight.
"""

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.base.errors import InvalidInputError
from pipeline.simulation.cards import Card

TABLE = Path(__file__).with_name("links.csv")
OWN_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|Gb)(?:/s|ps)")
SEVERAL = re.compile(r"([1-9]\d*)x(.+)")
BITS_OF_BYTE = 8


@dataclass(frozen=True)
class Link:
    """What connects the ranks of a training."""

    name: str
    gb_per_s: float
    """What a rank sends through it while it receives as much."""


def _read_table() -> tuple[dict[str, Link], dict[str, Link]]:
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    links = {row["link"]: Link(row["link"], float(row["gb_per_s"])) for row in rows}
    return links, {card: links[row["link"]] for row in rows for card in filter(None, row["cards"].split(";"))}


LINKS, _OF_CARDS = _read_table()
"""Links by name, and those of cards by the card's name in the table of cards."""


def link_of(card: Card) -> Link:
    """Return what connects several cards of a model in one machine."""
    return _OF_CARDS.get(card.gpu) or Link("PCIe", card.speeds.host_gb_per_s)


def find_link(text: str) -> Link:
    """Return the link of a name as nvlink4, of several as 8xinfiniband-ndr, or of a rate as 90GB/s or 400Gb/s.

    Raises:
        InvalidInputError: there is no such link.

    """
    if several := SEVERAL.fullmatch(text):
        one = find_link(several[2])
        return replace(one, name=text, gb_per_s=int(several[1]) * one.gb_per_s)
    if (own := OWN_RATE.fullmatch(text)) and float(own[1]):
        return Link(text, float(own[1]) / (BITS_OF_BYTE if own[2] == "Gb" else 1))
    if text not in LINKS:
        raise InvalidInputError(
            f"link is one of {', '.join(LINKS)}, several ports as 8xinfiniband-ndr, or what one direction carries, as "
            f"90GB/s or 400Gb/s, and is {text!r}; choose one of them"
        )
    return LINKS[text]
