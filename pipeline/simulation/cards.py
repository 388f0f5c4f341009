"""GPUs by name, whether or not this machine has one.

Compute capabilities are those of https://developer.nvidia.com/cuda-gpus. Memory is total_memory of
torch.cuda.get_device_properties, as printed in public logs: a little less than the data sheet says. Multiprocessors are
its multi_processor_count, which NVIDIA's architecture papers give as "SMs". The greatest clocks and the width of the
memory's bus are the data sheets'; Triton's tuning asks for them, memory does not depend on them.
"""

from dataclasses import dataclass

from pipeline.base.errors import InvalidInputError


@dataclass(frozen=True)
class Clocks:
    """The greatest clocks of a card, and the width of its memory's bus."""

    multiprocessor_mhz: int
    memory_mhz: int
    bus_bits: int


@dataclass(frozen=True)
class Context:
    """What a CUDA context takes of a card's memory after training."""

    mib: int
    source: str
    """Who measured it, on which versions."""


ASSUMED_CONTEXT = Context(512, "assumed")
"""Of a card whose context nobody measured after training: rather too large than too small.

Without any kernel it takes 120 to 550 MiB, which depends on the card (llama.cpp pull request 20595): 256 on an RTX 3090
(InvokeAI issue 9413), 426 on an RTX 6000 Ada (unsloth-zoo pull request 1053).
"""
T4_CONTEXT = Context(141, "140.875 MiB after steps in float16, torch 2.10+cu128 and 2.14+cu130: Anassbzdd/fitcheck")


@dataclass(frozen=True)
class Card:
    """A model of GPU."""

    name: str
    """As torch and NVML call it."""
    memory_mib: int
    capability: tuple[int, int]
    """CUDA compute capability."""
    num_multiprocessors: int
    clocks: Clocks
    context: Context = ASSUMED_CONTEXT


# Behind each card: where its memory is from; a T4 has 15,095 MiB with older drivers.
CARDS = {
    "b200": Card("NVIDIA B200", 182_642, (10, 0), 148, Clocks(1965, 3996, 8192)),  # total_memory
    "h200": Card("NVIDIA H200", 143_156, (9, 0), 132, Clocks(1980, 3201, 6144)),  # total_memory
    "h100": Card("NVIDIA H100 80GB HBM3", 81_090, (9, 0), 132, Clocks(1980, 2619, 5120)),  # total_memory
    "a100": Card("NVIDIA A100-SXM4-80GB", 81_152, (8, 0), 108, Clocks(1410, 1593, 5120)),  # OOTDiffusion issue 235
    "a100-40gb": Card("NVIDIA A100-SXM4-40GB", 40_536, (8, 0), 108, Clocks(1410, 1215, 5120)),  # total_memory
    "l40s": Card("NVIDIA L40S", 45_589, (8, 9), 142, Clocks(2520, 9001, 384)),  # total_memory
    "l4": Card("NVIDIA L4", 22_558, (8, 9), 58, Clocks(2040, 6251, 192)),  # "22.03 GiB": evo2 issue 190
    "a10g": Card("NVIDIA A10G", 22_587, (8, 6), 80, Clocks(1710, 6251, 384)),  # total_memory
    "rtx4090": Card(
        "NVIDIA GeForce RTX 4090", 24_084, (8, 9), 128, Clocks(2520, 10501, 384)
    ),  # SoulX-FlashTalk issue 5
    "rtx3090": Card("NVIDIA GeForce RTX 3090", 24_259, (8, 6), 82, Clocks(1695, 9751, 384)),  # total_memory
    "v100": Card("Tesla V100-SXM2-16GB", 16_160, (7, 0), 80, Clocks(1530, 877, 4096)),  # total_memory
    "t4": Card("Tesla T4", 14_912, (7, 5), 40, Clocks(1590, 5001, 256), T4_CONTEXT),  # Anassbzdd/fitcheck
}


def find_card(name: str) -> Card:
    """Return the card called `name`.

    Raises:
        InvalidInputError: there is no such card.

    """
    if name not in CARDS:
        raise InvalidInputError(f"no card is called {name!r}; the cards are {', '.join(CARDS)}")
    return CARDS[name]
