"""The settings of a plan, and the cards and budgets that they mean."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field, PositiveInt

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.units import check_one_limit, other_bytes, parse_budget
from pipeline.config.space import SpaceSettings
from pipeline.memory.device import find_device, hardware_of
from pipeline.prediction.cards import find_card
from pipeline.prediction.cuda_context import context_bytes_of
from pipeline.simulation.links import SEVERAL, Link, find_link


class PlanSettings(SpaceSettings):
    """The settings that `plan` adds to those of a run."""

    gpu: str = "auto"
    """Cards to plan for, separated by commas: h100, "RTX 4090", 2xt4, ...; one in words: memory=31.7GiB,capability=7.0;
    cpu; auto: the device of this machine."""
    gpus: PositiveInt | None = None
    """Cards that train together: h100 with 8 is 8xh100 with world_size 8; none: as gpu says, and each world_size."""
    link: str | None = None
    """What connects the cards: nvlink4, pcie4, 8xinfiniband-ndr, ethernet-100g, ..., or 90GB/s in one direction; none:
    what connects such cards in a machine."""
    other_processes: str | None = None
    """Memory of each card that other processes hold, such as 1.2GiB; none: nothing."""
    install: bool = False
    """Whether torch's CUDA build may be fetched (0.7 GB, 1.9 GB on disk) where the environment has a build for CPUs."""
    all: bool = False
    """Whether every configuration is predicted, or only those that may be the fastest within the budget."""
    effective_batch_sizes: list[PositiveInt] = Field(default=[])
    """Effective batches to plan for, each on every card, as [32, 64]; without any: effective_batch_size."""

    @property
    def known_link(self) -> Link | None:
        """The link of that name; None if it is to be the card's.

        Raises:
            InvalidInputError: there is no such link.

        """
        return None if self.link is None else find_link(self.link)


def size_of_all(own: PlanSettings, given: Mapping[str, Any]) -> dict[str, int]:
    """Return the setting world_size with which all `gpus` train together; nothing without `gpus`.

    Raises:
        InvalidInputError: another world_size is given.

    """
    if own.gpus is None:
        return {}
    if str(given.get("world_size", own.gpus)) != str(own.gpus):
        raise InvalidInputError(
            f"all gpus train together, and gpus is {own.gpus} and world_size {given['world_size']}; leave out one"
        )
    return {"world_size": own.gpus}


def targets(text: str, gpus: int | None = None) -> list[Hardware]:
    """Return the devices to plan for; they need not be in this machine. `2xt4` is a machine with two of them.

    `memory=24GiB` and other words are of the card before them; a semicolon separates cards as well. With `gpus` each is
    a machine with so many of it.

    Raises:
        InvalidInputError: there is no such card, or `gpus` is given and it is none, or its name says another number.

    """
    names: list[str] = []
    for group in text.split(";"):
        card, *words = group.split(",")
        names.append(card)
        for word in words:
            if "=" in word:
                names[-1] += f",{word}"
            else:
                names.append(word)
    devices = [_target(name.strip()) for name in names]
    return devices if gpus is None else [_several(device, gpus) for device in devices]


def _several(card: Hardware, gpus: int) -> Hardware:
    if card.kind != "cuda" or card.count not in (None, gpus):
        raise InvalidInputError(
            f"gpus counts the cards of a machine, and is {gpus}, and gpu is {card.name}; give one card, as --gpu h100"
        )
    return card if card.count else replace(card, count=gpus, name=f"{gpus} x {card.name}")


def _target(name: str) -> Hardware:
    if name in ("auto", "cpu") or name.startswith("cuda"):
        return hardware_of(find_device(name))
    several = SEVERAL.fullmatch(name)
    return find_card(name) if several is None else _several(find_card(several[2]), int(several[1]))


def budget_bytes_on(text: str | None, other_processes: str | None, target: Hardware) -> int:
    """Return the bytes that torch may use: the budget, or all of the card except its CUDA context and other processes.

    Raises:
        InvalidInputError: one of both cannot be read, both are given, or the other processes leave nothing.

    """
    budget = None if text in (None, "none") else text
    check_one_limit(budget, other_processes)
    if budget is not None:
        return parse_budget(budget, target.memory_bytes)
    return target.memory_bytes - context_bytes_of(target) - other_bytes(other_processes, target.memory_bytes)
