"""A command on simulated cards, from start to end."""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.simulation.cards import Card
from pipeline.simulation.environment import environment, python_of
from pipeline.simulation.report import Process, read_report


@dataclass(frozen=True)
class Simulated:
    """How a command ended on simulated cards."""

    exit_code: int
    processes: tuple[Process, ...]
    """Those that used a card."""


def run(
    command: Sequence[str],
    card: Card,
    *,
    num_cards: int = 1,
    budget_bytes: int | None = None,
    values: bool = False,
    python: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Simulated:
    """Run a command on a machine with such cards; its output goes where this process's goes.

    Raises:
        InvalidInputError: see environment() and python_of().

    """
    base = {**os.environ, **(variables or {})}
    with tempfile.TemporaryDirectory() as report:
        added = environment(
            card,
            python=python or python_of(command),
            num_cards=num_cards,
            budget_bytes=budget_bytes,
            report=Path(report),
            values=values,
            base=base,
        )
        done = subprocess.run(command, env={**base, **added})
        return Simulated(done.returncode, read_report(Path(report)))
