"""Links between cards by name, with what they carry in one direction: the table in links.csv, or a rate of one's own.

Its column `cards` has the cards that are so connected with the others of their machine; all others are by their PCIe.
Its column `gpus` has how many cards it connects where they are not the GPUS_PER_MACHINE of other machines, and `hosts`
how many computers these are in, each of which torchrun starts.
Its column `ports` has the cards whose machines have one such port for each of them, in NVIDIA's own machines. A ring of
all ranks sends through all ports of a machine at once: `8xinfiniband-ndr` is a machine with eight.
"""

import csv
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pipeline.base.errors import InvalidInputError
from pipeline.simulation.cards import Card

TABLE = Path(__file__).with_name("links.csv")
GPUS_PER_MACHINE = 8
"""Cards of a machine that no link of the table connects with more."""
OWN_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|Gb)(?:/s|ps)")
SEVERAL = re.compile(r"([1-9]\d*)x(.+)")
BITS_OF_BYTE = 8


@dataclass(frozen=True)
class Link:
    """What connects the ranks of a training."""

    name: str
    gb_per_s: float
    """What a rank, or all ranks of a machine, send through it while they receive as much."""
    gpus: int = GPUS_PER_MACHINE
    """The cards that it connects."""
    hosts: int = 1
    """The computers that these are in."""


@dataclass(frozen=True)
class Links:
    """What connects the GPUs of a machine, and machines with each other."""

    within: Link
    between: Link | None
    """What all ports of a machine carry; None: not known, as within a machine."""
    gpus_per_machine: int = GPUS_PER_MACHINE
    gpus_per_host: int = GPUS_PER_MACHINE
    """Those of a computer, of which a machine may have several."""

    def slowdown(self, num_ranks: int, step: int, all_ranks: int) -> float:
        """Return how many times as long as within a machine the slowest group of every `step`-th rank takes.

        All groups of so many ranks send at once, and have an equal share of a machine's ports.
        """
        num_groups = _groups_on_ports(num_ranks, step, all_ranks, self.gpus_per_machine)
        if self.between is None or not num_groups:
            return 1.0
        return max(1.0, num_groups * self.within.gb_per_s / self.between.gb_per_s)


@cache
def _groups_on_ports(num_ranks: int, step: int, all_ranks: int, gpus_per_machine: int) -> int:
    """Return the largest number of groups that send over the ports of one machine; 0 if each group is on one."""
    counts = Counter[int]()
    for block in range(0, all_ranks, num_ranks * step):
        for first in range(block, block + step):
            machines = {rank // gpus_per_machine for rank in range(first, first + num_ranks * step, step)}
            counts.update(machines if len(machines) > 1 else ())
    return max(counts.values(), default=0)


def _read_table() -> tuple[dict[str, Link], dict[str, Link], dict[str, Link]]:
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    links = {
        row["link"]: Link(
            row["link"], float(row["gb_per_s"]), int(row["gpus"] or GPUS_PER_MACHINE), int(row["hosts"] or 1)
        )
        for row in rows
    }

    def of_cards(column: str) -> dict[str, Link]:
        return {card: links[row["link"]] for row in rows for card in filter(None, row[column].split(";"))}

    return links, of_cards("cards"), of_cards("ports")


LINKS, _OF_CARDS, _PORTS = _read_table()
"""Links by name, and those of cards, and ports of their machines, by the card's name in the table of cards."""


def link_of(card: Card) -> Link:
    """Return what connects several cards of a model in one machine."""
    return _OF_CARDS.get(card.gpu) or Link("PCIe", card.host_gb_per_s)


def link_between(card: Card, gpus_per_machine: int) -> Link | None:
    """Return what connects machines with so many cards of a model, a port for each; None where it is not known."""
    port = _PORTS.get(card.gpu)
    return port and find_link(f"{gpus_per_machine}x{port.name}")


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
            f"a link is one of {', '.join(LINKS)}, several as 8xinfiniband-ndr, or what one direction carries, as "
            f"90GB/s or 400Gb/s, and is {text!r}; choose one of them"
        )
    return LINKS[text]
