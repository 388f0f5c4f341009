"""GPUs by name, whether or not this machine has one.

Compute capabilities are those of https://developer.nvidia.com/cuda-gpus. Memory is total_memory of
torch.cuda.get_device_properties, as printed in public logs: a little less than the data sheet says. Multiprocessors are
its multi_processor_count, which NVIDIA's architecture papers give as "SMs".
"""

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB

CONTEXT_BYTES = 512 * MIB
"""Assumed size of a CUDA context that has not been measured.

Since CUDA 11.7 torch loads kernels when they are first used, and needs some hundred MiB (pytorch issue 107667).
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
    "a100": _card("NVIDIA A100-SXM4-80GB", 81_920, (8, 0), 108),  # nvidia-smi's memory.total, which is a little more
    "a100-40gb": _card("NVIDIA A100-SXM4-40GB", 40_536, (8, 0), 108),  # total_memory
    "l40s": _card("NVIDIA L40S", 45_589, (8, 9), 142),  # total_memory
    "l4": _card(
        "NVIDIA L4", 22_558, (8, 9), 58
    ),  # "22.03 GiB" of errors for lack of memory: ArcInstitute/evo2 issue 190
    "a10g": _card("NVIDIA A10G", 22_587, (8, 6), 80),  # total_memory
    "rtx4090": _card("NVIDIA GeForce RTX 4090", 24_084, (8, 9), 128),  # "23.52 GiB": Soul-AILab/SoulX-FlashTalk issue 5
    "rtx3090": _card("NVIDIA GeForce RTX 3090", 24_259, (8, 6), 82),  # total_memory
    "v100": _card("Tesla V100-SXM2-16GB", 16_160, (7, 0), 80),  # total_memory
    "t4": _card("Tesla T4", 15_095, (7, 5), 40),  # total_memory
}


def find_card(name: str) -> Hardware:
    """Return the card called `name`.

    Raises:
        InvalidInputError: there is no such card.

    """
    if name not in CARDS:
        raise InvalidInputError(f"no card is called {name!r}; the cards are {', '.join(CARDS)}")
    return CARDS[name]
