"""Simulated cards, and processes that run on them.

    python tests/cuda_without_gpu/cards.py h200 -m pytest -m gpu
    python tests/cuda_without_gpu/cards.py t4 --count 2 script.py

What follows the card are arguments of .venv-cuda's Python.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".venv-cuda"
"""The environment with torch's CUDA build, as `make .venv-cuda/installed` makes it."""
PYTHON = FOLDER / "bin" / "python"


@dataclass(frozen=True)
class SimulatedCard:
    """The properties of a card that the stand-in has."""

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    memory_mib: int
    """total_memory of torch.cuda.get_device_properties."""


# Names and memories: as torch shows them in public logs, see pipeline/prediction/cards.py. Capabilities:
# https://developer.nvidia.com/cuda-gpus. Multiprocessors: NVIDIA's papers on Hopper, Ampere, Ada and Turing.
CARDS = {
    "h200": SimulatedCard("NVIDIA H200", (9, 0), 132, 143_156),
    "a100": SimulatedCard("NVIDIA A100-SXM4-80GB", (8, 0), 108, 81_152),
    "rtx4090": SimulatedCard("NVIDIA GeForce RTX 4090", (8, 9), 128, 24_084),
    "t4": SimulatedCard("Tesla T4", (7, 5), 40, 14_912),
}


def environment_of(card: str, num_devices: int = 1) -> dict[str, str]:
    """Return the variables by which a process of .venv-cuda runs on a machine with so many cards of this model."""
    it = CARDS[card]
    major, minor = it.capability
    [libraries] = FOLDER.glob("lib/python*/site-packages/nvidia/cu*/lib")
    return {
        "SIMULATED_CARD_NAME": it.name,
        "SIMULATED_CARD_CAPABILITY": f"{major}.{minor}",
        "SIMULATED_CARD_MULTIPROCESSORS": str(it.num_multiprocessors),
        "SIMULATED_CARD_MEMORY_MIB": str(it.memory_mib),
        "SIMULATED_CARD_COUNT": str(num_devices),
        "LD_LIBRARY_PATH": str(libraries),  # where pynvml finds libnvidia-ml.so.1
    }


def main() -> None:
    """Become the process that the command line describes."""
    card, *words = sys.argv[1:]
    num_devices = 1
    if words[:1] == ["--count"]:
        num_devices, words = int(words[1]), words[2:]
    os.execve(PYTHON, [str(PYTHON), *words], {**os.environ, **environment_of(card, num_devices)})


if __name__ == "__main__":
    main()
