"""GPUs by name, whether or not this machine has one.

Compute capabilities are those of https://developer.nvidia.com/cuda-gpus. Memory is total_memory of
torch.cuda.get_device_properties, as printed in public logs: a little less than the data sheet says. Multiprocessors are
its multi_processor_count, which NVIDIA's architecture papers give as "SMs".
"""

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB

CONTEXT_MIB = {"Tesla T4": 141}
"""Sizes of CUDA contexts, by the card's name, that others measured after training on it.

T4: 140.875 MiB after steps in float16, torch 2.10+cu128 and 2.14+cu130 (Anassbzdd/fitcheck, data/measurements).
"""
OTHER_CONTEXT_MIB = 512
"""Assumed size of a CUDA context that nobody measured after training: rather too large than too small.

Without any kernel it takes 120 to 550 MiB, which depends on the card (llama.cpp pull request 20595): 256 on an RTX 3090
(InvokeAI issue 9413), 426 on an RTX 6000 Ada (unsloth-zoo pull request 1053).
"""
OLDEST_CAPABILITY = (7, 5)
"""Compute capability from which on torch's builds for CUDA 13 have kernels, the default ones.

Torch 2.14 is the last with a build for CUDA 12.6, which has them from 5.0 on (pytorch issues 172352 and 190385).
"""


def _card(name: str, memory_mib: int, capability: tuple[int, int], num_multiprocessors: int) -> Hardware:
    return Hardware(
        kind="cuda",
        name=name,
        memory_bytes=memory_mib * MIB,
        capability=capability,
        num_multiprocessors=num_multiprocessors,
    )


CARDS = {
    "b200": _card("NVIDIA B200", 182_642, (10, 0), 148),  # total_memory
    "h200": _card("NVIDIA H200", 143_156, (9, 0), 132),  # total_memory
    "h100": _card("NVIDIA H100 80GB HBM3", 81_090, (9, 0), 132),  # total_memory
    "a100": _card("NVIDIA A100-SXM4-80GB", 81_152, (8, 0), 108),  # "79.25 GiB": levihsu/OOTDiffusion issue 235
    "a100-40gb": _card("NVIDIA A100-SXM4-40GB", 40_536, (8, 0), 108),  # total_memory
    "l40s": _card("NVIDIA L40S", 45_589, (8, 9), 142),  # total_memory
    "l4": _card("NVIDIA L4", 22_558, (8, 9), 58),  # "22.03 GiB" of out-of-memory errors: ArcInstitute/evo2 issue 190
    "a10g": _card("NVIDIA A10G", 22_587, (8, 6), 80),  # total_memory
    "rtx4090": _card("NVIDIA GeForce RTX 4090", 24_084, (8, 9), 128),  # "23.52 GiB": Soul-AILab/SoulX-FlashTalk issue 5
    "rtx3090": _card("NVIDIA GeForce RTX 3090", 24_259, (8, 6), 82),  # total_memory
    "v100": _card("Tesla V100-SXM2-16GB", 16_160, (7, 0), 80),  # total_memory
    "t4": _card("Tesla T4", 14_912, (7, 5), 40),  # Anassbzdd/fitcheck; older drivers leave 15,095
}


def find_card(name: str) -> Hardware:
    """Return the card called `name`.

    Raises:
        InvalidInputError: there is no such card.

    """
    if name not in CARDS:
        raise InvalidInputError(f"no card is called {name!r}; the cards are {', '.join(CARDS)}")
    return CARDS[name]


def assumed_context_bytes(card: Hardware) -> int:
    """Return the size of the CUDA context on a card that is not in this machine."""
    return CONTEXT_MIB.get(card.name, OTHER_CONTEXT_MIB) * MIB


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
