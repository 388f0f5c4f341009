"""Processes of .venv-cuda on simulated cards.

    python tests/cuda_without_gpu/cards.py h200 -m pytest -m gpu
    python tests/cuda_without_gpu/cards.py t4 --count 2 script.py

What follows the card are arguments of .venv-cuda's Python.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.simulation.cards import find_card
from pipeline.simulation.environment import environment

FOLDER = Path(__file__).parents[2] / ".venv-cuda"
"""The environment with torch's CUDA build, as `make .venv-cuda/installed` makes it."""
PYTHON = FOLDER / "bin" / "python"


def environment_of(
    card: str, num_devices: int = 1, base: Mapping[str, str] = os.environ, values: bool = False
) -> dict[str, str]:
    """Return the variables by which a process of .venv-cuda runs on a machine with so many cards of this model."""
    return environment(find_card(card), python=PYTHON, num_cards=num_devices, values=values, base=base)


def main() -> None:
    """Become the process that the command line describes."""
    card, *words = sys.argv[1:]
    num_devices = 1
    if words[:1] == ["--count"]:
        num_devices, words = int(words[1]), words[2:]
    os.execve(PYTHON, [str(PYTHON), *words], {**os.environ, **environment_of(card, num_devices)})


if __name__ == "__main__":
    main()
