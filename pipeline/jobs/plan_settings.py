"""The settings of a plan, and the cards and budgets that they mean."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.units import allowed_bytes
from pipeline.config.space import SpaceSettings
from pipeline.memory.device import find_device, hardware_of
from pipeline.planning.rates import links_of
from pipeline.prediction.card_processes import is_of_this_machine
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.cuda_context import context_bytes_of
from pipeline.simulation.links import SEVERAL, Links, find_link

BETWEEN_CARDS = re.compile(r";|,(?![^,;]*=)")
"""What separates cards: a comma before a word with = is of a card in words."""


class PlanSettings(SpaceSettings):
    """The settings that `plan` adds to those of a run."""

    gpu: str = "auto"
    """Cards to plan for, separated by commas: h100, "RTX 4090", 2xt4, ...; one in words: memory=31.7GiB,capability=7.0;
    cpu; auto: the device of this machine."""
    gpus: str | None = None
    """Cards that train together: h100 with 8 is 8xh100 with world_size 8; 1,2,4: a plan for each of these numbers;
    none: as gpu says, and each world_size."""
    prices: dict[str, PositiveFloat] = Field(default={})
    """What an hour of a card costs, as {"h100": 2.5, "a100": 1.3}, in any currency: the plan says what tokens cost."""
    link: str | None = None
    """What connects the cards of a machine: nvlink4, pcie4, ethernet-100g, ..., or 90GB/s in one direction; none: what
    connects such cards."""
    machine_link: str | None = None
    """What all ports of a machine carry to others, where there are more cards than one has: 8xinfiniband-ndr, 400Gb/s,
    ...; none: those of NVIDIA's own machines with such cards, else as within a machine."""
    gpus_per_machine: PositiveInt | None = None
    """Cards of a machine, which have neighbouring numbers; none: 8, and 72 of GB200, whose NVLink connects a rack."""
    other_processes: str | None = None
    """Memory of each card that other processes hold, such as 1.2GiB; none: nothing."""
    install: bool = False
    """Whether torch's CUDA build may be fetched (0.7 GB, 1.9 GB on disk) where the environment has a build for CPUs."""
    all: bool = False
    """Whether every configuration is predicted, or only those that may be the fastest within the budget."""
    effective_batch_sizes: list[PositiveInt] = Field(default=[])
    """Effective batches to plan for, each on every card, as [32, 64]; without any: effective_batch_size."""

    @field_validator("gpus", mode="before")
    @classmethod
    def _are_numbers(cls, value: Any) -> str | None:
        numbers = [] if value is None else str(value).replace(" ", "").split(",")
        if not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise ValueError("must be a number of cards, or several with commas, as 1,2,4")
        return ",".join(numbers) or None

    @property
    def nums_gpus(self) -> tuple[int, ...]:
        """The numbers of cards that train together, each once; none where `gpu` says it."""
        return tuple(dict.fromkeys(map(int, self.gpus.split(",")))) if self.gpus else ()

    def links(self, target: Hardware) -> Links | None:
        """Return what connects cards of a model; None on a CPU.

        Raises:
            InvalidInputError: there is no such link.

        """
        within, between = (None if name is None else find_link(name) for name in (self.link, self.machine_link))
        return links_of(target, within, between, self.gpus_per_machine) if target.kind == "cuda" else None


def check_world_size(own: PlanSettings, given: Mapping[str, Any]) -> None:
    """Check that no other world_size is given than that of all `gpus`.

    Raises:
        InvalidInputError: one is.

    """
    if own.gpus is not None and str(given.get("world_size", own.gpus)) != own.gpus:
        raise InvalidInputError(
            f"all gpus train together, and gpus is {own.gpus} and world_size {given['world_size']}; leave out one"
        )


def targets(text: str, nums_gpus: Sequence[int] = ()) -> list[Hardware]:
    """Return the devices to plan for; they need not be in this machine. `2xt4` is a machine with two of them.

    `memory=24GiB` and other words are of the card before them; a semicolon separates cards as well. With `nums_gpus`
    there is a machine with each of these numbers of each card.

    Raises:
        InvalidInputError: there is no such card, or `nums_gpus` are given and it is none, or its name says a number.

    """
    devices = [target_of(name.strip()) for name in BETWEEN_CARDS.split(text)]
    return [_several(device, number) for device in devices for number in nums_gpus] if nums_gpus else devices


def price_per_hour(target: Hardware, prices: Mapping[str, float]) -> float | None:
    """Return what an hour of a machine costs, by the prices of cards by name; None where its card has none.

    Raises:
        InvalidInputError: a price is of no card.

    """
    of_one, count = {find_hardware(name).name: price for name, price in prices.items()}, target.count or 1
    price = of_one.get(target.name_of_one)
    return None if price is None else price * count


def _several(card: Hardware, gpus: int) -> Hardware:
    if card.kind != "cuda" or card.count not in (None, gpus):
        raise InvalidInputError(
            f"gpus counts cards that train together, and is {gpus}, and gpu is {card.name}; give one, as --gpu h100"
        )
    return card if card.count else replace(card, count=gpus, name=f"{gpus} x {card.name}")


def target_of(name: str) -> Hardware:
    """Return what a name of --gpu names: a device of this machine, a card, or several as 8xh100.

    Raises:
        InvalidInputError: there is no such device or card.

    """
    if is_of_this_machine(name):
        return hardware_of(find_device(name))
    several = SEVERAL.fullmatch(name)
    return find_hardware(name) if several is None else _several(find_hardware(several[2]), int(several[1]))


def budget_bytes_on(text: str | None, other_processes: str | None, target: Hardware) -> int:
    """Return the bytes that torch may use: the budget, or all of the card except its CUDA context and other processes.

    Raises:
        InvalidInputError: one of both cannot be read, both are given, or the other processes leave nothing.

    """
    budget = None if text in (None, "none") else text
    return allowed_bytes(budget, other_processes, target.memory_bytes, context_bytes_of(target))
