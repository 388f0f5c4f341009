"""Programs that run on a simulated card in processes of their own, and what each did on it."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline.simulation.cards import find_card
from pipeline.simulation.report import Process
from pipeline.simulation.run import Simulate, SimulatedRun, run_command


def run(*words: str, card: str = "h100", **options: Any) -> SimulatedRun:
    wanted = Simulate(command=(sys.executable, *words), card=find_card(card), num_steps=None, **options)
    with tempfile.TemporaryDirectory() as folder:
        return run_command(wanted, Path(folder))


def run_code(code: str, *words: str, **options: Any) -> SimulatedRun:
    return run("-c", code, *words, **options)


def only(result: SimulatedRun) -> Process:
    assert result.exit_code == 0
    [process] = result.processes
    return process
