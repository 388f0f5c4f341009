"""The cards of pipeline/simulation/cards.py as prediction sees them."""

from dataclasses import replace

from pipeline.base.contracts import Hardware
from pipeline.base.units import MIB
from pipeline.simulation import cards
from pipeline.simulation.cards import ASSUMED_CONTEXT, UNLIMITED_MIB, Card, card_called, most_similar
from pipeline.simulation.environment import card_variables

BUILDS = (
    ((7, 5), None),
    ((5, 0), "torch 2.14 or older built for CUDA 12.6"),
    ((3, 7), "torch 2.7 or older built for CUDA 11.8"),
)
"""Compute capabilities from which on builds of torch have kernels, and the builds; None: the default one, for CUDA 13.

Torch 2.14 is the last with a build for CUDA 12.6, which has them from 5.0 on (pytorch issues 172352 and 190385), and
builds for CUDA 11.8 have sm_37 (the architectures that torch.cuda.get_arch_list() shows there).
"""


def _hardware(card: Card) -> Hardware:
    return Hardware(
        kind="cuda",
        name=card.name,
        memory_bytes=card.memory_mib * MIB,
        capability=card.capability,
        num_multiprocessors=card.num_multiprocessors,
    )


def find_hardware(name: str) -> Hardware:
    """Return the card of a name or of a description.

    Raises:
        InvalidInputError: there is no such card.

    """
    return _hardware(cards.find_card(name))


def assumed_context_bytes(card: Hardware) -> int:
    """Return the size of the CUDA context on a card that is not in this machine."""
    known = card_called(model_of(card), card.memory_bytes / MIB)
    return (known.context if known else ASSUMED_CONTEXT).mib * MIB


def model_of(card: Hardware) -> str:
    """Return the name of a card without how many there are of it, and without what was said of it in words."""
    return card.name_of_one.partition(" (")[0]


def card_like(target: Hardware) -> Card:
    """Return the card of the table that a card is, or the one that is most similar."""
    memory_mib = target.memory_bytes // MIB
    found = card_called(model_of(target), memory_mib)
    return found or most_similar(target.capability or (0, 0), memory_mib, target.name)


def notes_on_card(card: Hardware) -> tuple[str, ...]:
    """Return what training on a card needs besides memory, and what is not known of the card; nothing for a CPU."""
    known = card_called(card.name, card.memory_bytes / MIB)
    notes = (_note_on_build(card), known.note if known and card.count is None else None)
    return tuple(note for note in notes if note)


def _note_on_build(card: Hardware) -> str | None:
    """Return which build of torch has kernels for a card; None if the default one has them."""
    if card.capability is None or card.capability >= BUILDS[0][0]:
        return None
    build = next((build for capability, build in BUILDS if card.capability >= capability), None)
    remedy = f"install {build}" if build else "no build of torch 2 has them"
    return (
        f"torch's default build has no kernels for {card.name} (compute capability {_dotted(card.capability)}, and it "
        f"begins at {_dotted(BUILDS[0][0])}): {remedy}."
    )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def variables_on(target: Hardware) -> dict[str, str]:
    """Return the variables by which a process runs on such a card with memory for every training."""
    assert target.capability is not None
    assert target.num_multiprocessors is not None
    card = replace(
        card_like(target),
        name=target.name_of_one,
        memory_mib=UNLIMITED_MIB,
        capability=target.capability,
        num_multiprocessors=target.num_multiprocessors,
    )
    return card_variables(card)
