"""The cards of pipeline/simulation/cards.py as prediction sees them."""

from pipeline.base.contracts import Hardware
from pipeline.base.units import MIB
from pipeline.simulation import cards
from pipeline.simulation.cards import ASSUMED_CONTEXT, Card

OLDEST_CAPABILITY = (7, 5)
"""Compute capability from which on torch's builds for CUDA 13 have kernels, the default ones.

Torch 2.14 is the last with a build for CUDA 12.6, which has them from 5.0 on (pytorch issues 172352 and 190385).
"""


def _hardware(card: Card) -> Hardware:
    return Hardware(
        kind="cuda",
        name=card.name,
        memory_bytes=card.memory_mib * MIB,
        capability=card.capability,
        num_multiprocessors=card.num_multiprocessors,
    )


CARDS = {name: _hardware(card) for name, card in cards.CARDS.items()}
_CONTEXTS = {card.name: card.context for card in cards.CARDS.values()}


def find_card(name: str) -> Hardware:
    """Return the card called `name`.

    Raises:
        InvalidInputError: there is no such card.

    """
    return _hardware(cards.find_card(name))


def assumed_context_bytes(card: Hardware) -> int:
    """Return the size of the CUDA context on a card that is not in this machine."""
    return _CONTEXTS.get(card.name, ASSUMED_CONTEXT).mib * MIB


def note_on(card: Hardware) -> str | None:
    """Return what training on a card needs besides memory; None if torch's default build has kernels for it."""
    if card.capability is None or card.capability >= OLDEST_CAPABILITY:
        return None
    return (
        f"torch's default build has no kernels for {card.name} (compute capability {_dotted(card.capability)}, and it "
        f"begins at {_dotted(OLDEST_CAPABILITY)}): install torch 2.14 or older built for CUDA 12.6."
    )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
