"""GPUs by name, whether or not this machine has one: the table in cards.csv, and cards that are described in words.

Memory is total_memory of torch.cuda.get_device_properties, as printed in public logs, which is a little less than the
data sheet says; where a row's source is nvidia-smi, it is that program's number, which is up to 3 % more. Drivers
differ by up to 2 %: of several numbers the table has one of a recent driver. Compute capabilities are those of
https://developer.nvidia.com/cuda-gpus, multiprocessors are torch's multi_processor_count, which NVIDIA's architecture
papers give as "SMs". The greatest clocks, the width of the memory's bus and the L2 cache are the data sheets' and the
architecture papers'; Triton's tuning asks for them, and torch.compile clears the L2 cache with a tensor of its size
before it times a kernel. What a card does in a second is dense, and summed in float32.
"""

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.base.errors import InvalidInputError, close_to
from pipeline.base.units import MIB, parse_size

TABLE = Path(__file__).with_name("cards.csv")
WORDS = ("memory", "capability", "multiprocessors")
"""What can be said of a card in words, as memory=31.7GiB."""
EXAMPLE = "memory=31.7GiB,capability=7.0"
NOT_OF_TORCH = "nvidia-smi"
"""Source of a memory that torch does not show so."""
GEFORCE = "GeForce"
"""Series of cards that sum in float32 at half the rate."""
LEFT_OUT = re.compile(r"nvidia|geforce|tesla|quadro|rtx|gtx|generation|gpu|[\s_-]")
"""What people leave out of a card's name, or write in several ways."""
SIZED = re.compile(r"(.+?)[\s_(-]+(\d+)\s*gi?b?\)?", re.IGNORECASE)
"""A name with the memory behind it, as people write 3060 12GB."""
SHARE_OF_SIZE = (0.88, 1.02)
"""What torch shows of that memory, least and most."""
UNLIMITED_MIB = 1 << 20
"""Memory of a card on which every training has room: 1 TiB."""


@dataclass(frozen=True)
class Context:
    """What a CUDA context takes of a card's memory after training."""

    mib: int
    source: str
    """Who measured it, on which versions."""
    is_assumed: bool = False
    """Whether it is not of this card."""


ASSUMED_CONTEXT = Context(512, "assumed", is_assumed=True)
"""Of a card whose context nobody measured after training, nor that of one with the same chip.

Without any kernel it takes 120 to 550 MiB, which depends on the card (llama.cpp pull request 20595): 256 on an RTX 3090
(InvokeAI issue 9413), 426 on an RTX 6000 Ada (unsloth-zoo pull request 1053).
"""
T4_CONTEXT = Context(141, "140.875 MiB after steps in float16, torch 2.10+cu128 and 2.14+cu130: Anassbzdd/fitcheck")
H200_CONTEXT = Context(764, "763.6 MiB after steps in bfloat16, torch 2.11+cu130, driver 580.159.04: measured here")
SAME_CHIP = replace(H200_CONTEXT, source="that of an H200, which has the same chip", is_assumed=True)
CONTEXTS = {
    "t4": T4_CONTEXT,
    "h200": H200_CONTEXT,
    **dict.fromkeys(("h100", "h100-pcie", "h100-nvl", "gh200"), SAME_CHIP),
}
"""By the card's name in CARDS; of all others it is ASSUMED_CONTEXT."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A model of GPU: a row of the table; its clocks are the greatest, and what it does in a second is at most so."""

    gpu: str
    """What the setting gpu takes for it."""
    name: str
    """As torch and NVML call it."""
    memory_mib: int
    capability: tuple[int, int]
    """CUDA compute capability."""
    num_multiprocessors: int
    multiprocessor_mhz: int
    memory_mhz: int
    bus_bits: int
    """Width of the memory's bus."""
    l2_mib: float
    """The cache between memory and multiprocessors."""
    float32_tflops: float
    """Products in float32 on the general cores."""
    tf32_tflops: float
    """Products in tf32; where a card has none, as float32."""
    half_tflops: float
    """Products in bf16 and fp16, summed in float32."""
    memory_gb_per_s: float
    """What its memory reads and writes."""
    host_gb_per_s: float
    """What moves between it and the host in one direction: all lanes of its PCIe generation, or NVLink-C2C."""
    context: Context = ASSUMED_CONTEXT
    other_names: tuple[str, ...] = ()
    memory_source: str = "given"

    @property
    def note(self) -> str | None:
        """What is not known of its memory, as a sentence."""
        if self.memory_source != NOT_OF_TORCH:
            return None
        return f"The memory of {self.name}, {self.memory_mib:,} MiB, is nvidia-smi's: torch shows up to 3 % less."

    def is_called(self, text: str) -> bool:
        """Whether people call it so."""
        return _plain(text) in map(_plain, (self.gpu, self.name, *self.other_names))


def _read_table() -> dict[str, Card]:
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["gpu"]: _card(row) for row in rows}


def _card(row: dict[str, str]) -> Card:
    """Return a row of the table; without pydantic, whose import takes longer than a list of the entry points."""
    plain: dict[str, Any] = {
        name: kind(row[name]) for name, kind in Card.__annotations__.items() if kind in (int, float, str)
    }
    major, _, minor = row["capability"].partition(".")
    other_names = tuple(filter(None, row["other_names"].split(";")))
    context = CONTEXTS.get(row["gpu"], ASSUMED_CONTEXT)
    return Card(**plain, capability=(int(major), int(minor)), other_names=other_names, context=context)


CARDS = _read_table()
"""Cards by the name that the setting gpu takes for them."""


def find_card(text: str) -> Card:
    """Return the card of a name, as people write it or as nvidia-smi prints it, or of a description.

    `memory=31.7GiB,capability=7.0` describes a card, and `rtx2080ti,memory=22GiB` one that differs from a named one.
    What is not said of a card without a name is that of the most similar one in the table.

    Raises:
        InvalidInputError: there is no such card, or its description cannot be read.

    """
    parts = [part.strip() for part in text.split(",")]
    names = [part for part in parts if "=" not in part]
    given = dict(part.split("=", 1) for part in parts if "=" in part)
    if len(names) > 1:
        raise InvalidInputError(f"one card is needed here, and {text!r} has {len(names)}; name one of them")
    if names and not given:
        return _named(names[0])
    if unknown := [word for word in given if word not in WORDS]:
        raise InvalidInputError(
            f"a card is described by {', '.join(WORDS)}, and {text!r} has {unknown[0]}; write for example {EXAMPLE}"
        )
    if not names and not {"memory", "capability"} <= given.keys():
        raise InvalidInputError(
            f"a card without a name needs its memory and its compute capability, and {text!r} has no "
            f"{'capability' if 'memory' in given else 'memory'}; write for example {EXAMPLE}"
        )
    return _described(_named(names[0]) if names else None, given)


def _named(text: str) -> Card:
    if text in CARDS:
        return CARDS[text]
    cards = CARDS.values()
    found = [card for card in cards if _plain(card.gpu) == _plain(text)] or [c for c in cards if c.is_called(text)]
    if not found and (sized := SIZED.fullmatch(text)):
        low, high = (share * int(sized[2]) * 1024 for share in SHARE_OF_SIZE)
        found = [card for card in cards if card.is_called(sized[1]) and low <= card.memory_mib <= high]
    if len(found) == 1:
        return found[0]
    if found:
        cards_of_the_name = " and ".join(f"{card.gpu} ({card.memory_mib:,} MiB)" for card in found)
        raise InvalidInputError(f"{text!r} is the name of {cards_of_the_name}; name one of them")
    closest = close_to(_plain(text), CARDS, most=3, likeness=0)
    raise InvalidInputError(
        f"no card is called {text!r}; the closest are {', '.join(closest)}, all {len(CARDS)} are in {TABLE}; any other "
        f"card in words: --gpu {EXAMPLE}"
    )


def _described(named: Card | None, given: dict[str, str]) -> Card:
    """Return the card with what is given of it."""
    capability = _capability(given["capability"]) if "capability" in given else None
    memory_mib = parse_size(given["memory"]) // MIB if "memory" in given else None
    if memory_mib == 0:
        raise InvalidInputError(f"a card has 1 MiB or more, not {given['memory']}; write for example memory=24GiB")
    if "multiprocessors" in given and not re.fullmatch(r"[1-9]\d*", given["multiprocessors"]):
        raise InvalidInputError(
            f"multiprocessors must be a number from 1 on, and is {given['multiprocessors']!r}; the data sheet has it"
        )
    base = named or most_similar(capability or (0, 0), memory_mib or 0)
    words = ",".join(f"{word}={given[word]}" for word in WORDS if word in given)
    gpu = f"{named.gpu},{words}" if named else words
    return replace(
        base,
        gpu=gpu,
        name=f"{base.name} ({words})" if named else f"card like {base.name} ({words})",
        memory_mib=memory_mib or base.memory_mib,
        capability=capability or base.capability,
        num_multiprocessors=int(given.get("multiprocessors", base.num_multiprocessors)),
        context=base.context if named else ASSUMED_CONTEXT,
        other_names=(),
        memory_source="given" if memory_mib else base.memory_source,
    )


def _capability(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if found is None:
        raise InvalidInputError(
            f"a compute capability is two numbers such as 7.0 or 12.0, not {text!r}; "
            "https://developer.nvidia.com/cuda-gpus has those of all cards"
        )
    return int(found[1]), int(found[2])


def card_called(name: str, memory_mib: float) -> Card | None:
    """Return the card that torch calls so, of several the one of the closest memory; None if none is known."""
    called = [card for card in CARDS.values() if card.name == name]
    return min(called, key=lambda card: abs(card.memory_mib - memory_mib), default=None)


def most_similar(capability: tuple[int, int], memory_mib: int, name: str | None = None) -> Card:
    """Return the card of the closest compute capability; of these one of the series that a name says, if there is one.

    Of several it is the one of the closest memory.
    """

    def distance(card: Card) -> tuple[int, bool, int]:
        (major, minor), (own_major, own_minor) = card.capability, capability
        is_other_series = name is not None and (GEFORCE in card.name) != (GEFORCE in name)
        farther = abs(10 * (major - own_major) + minor - own_minor)
        return farther, is_other_series, abs(card.memory_mib - memory_mib)

    return min(CARDS.values(), key=distance)


def cards_with(capability: tuple[int, int], num_bytes: int) -> Iterable[str]:
    """Return the names of the cards of a capability that have so much memory beside a context, the smallest first."""
    free_mib = {card: card.memory_mib - card.context.mib for card in CARDS.values()}
    enough = [card for card in free_mib if card.capability == capability and free_mib[card] * MIB >= num_bytes]
    return (card.gpu for card in sorted(enough, key=lambda card: card.memory_mib))


def _plain(name: str) -> str:
    """Return a name without what people leave out of it."""
    return LEFT_OUT.sub("", name.lower())
