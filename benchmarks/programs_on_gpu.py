"""Programs of several frameworks on this machine's GPU and on a simulated card like it: their peaks side by side.

    python benchmarks/programs_on_gpu.py TABLE.csv
    python benchmarks/programs_on_gpu.py TABLE.csv --rows 'Trainer|Whisper'

The programs are those of simulated_scripts.py that take one card. Both runs are of the same environment; several run at
once, which changes no peak of a process's own allocator. It writes what the table does not have.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore
from typing import Any

import torch
from exit_code import exit_code_of
from rows import add_missing
from simulated_scripts import CASES, PROGRAMS

from pipeline.base.units import MIB
from pipeline.memory.device import find_device
from pipeline.prediction.simulation import Simulation, simulate
from pipeline.runtime.environment import environment
from pipeline.simulation.cards import find_card
from pipeline.simulation.run import Simulate

TIME_LIMIT_SECONDS = 240.0
ON_GPU_AT_ONCE = Semaphore(3)
"""Programs that share the GPU at a time, so that each finds room."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The peaks of one program; MiB of 2^20 bytes. A program that failed in either run has no peaks there."""

    program: str
    command: str
    device_name: str
    driver: str
    torch: str
    transformers: str
    measured_allocated_mib: float | None
    simulated_allocated_mib: float | None
    allocated_difference_percent: float | None
    measured_reserved_mib: float | None
    simulated_reserved_mib: float | None
    reserved_difference_percent: float | None
    simulated_reserved_with_workspaces_mib: float | None
    """With the largest workspaces that cuDNN may take."""
    with_values: bool
    verdict: str
    failure: str


def measured(words: list[str], folder: Path) -> dict[str, Any]:
    """Return the peaks of a script on the GPU, or why it failed."""
    result = folder / "measured.json"
    command = [sys.executable, str(Path(__file__).with_name("measured_program.py")), str(result), *words]
    with ON_GPU_AT_ONCE:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return {"failure": f"took more than {TIME_LIMIT_SECONDS:.0f} seconds"}
    if done.returncode:
        return {"failure": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def simulated(words: list[str], card: str, folder: Path) -> Simulation:
    """Return what the script needs of a simulated card."""
    wanted = Simulate(
        command=(sys.executable, *words),
        card=find_card(card),
        num_steps=None,
        time_limit_seconds=TIME_LIMIT_SECONDS,
    )
    return simulate(wanted, folder, may_need_values=True, finds_smallest=False, is_hidden=True)


def row(program: str, card: str, about: dict[str, str]) -> Row:
    """Run a program on the GPU and on the simulated card."""
    _, script, *arguments = CASES[program][1].split()
    words = [str(PROGRAMS / script), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        real = measured(words, Path(folder))
        found = simulated(words, card, Path(folder) / "simulated")
    one = found.largest
    sides = {
        "allocated": (real.get("allocated_bytes"), None if one is None else one.peak_allocated_bytes),
        "reserved": (real.get("reserved_bytes"), None if one is None else one.peak_reserved_bytes),
    }
    peaks: dict[str, float | None] = {"simulated_reserved_with_workspaces_mib": None}
    for name, (truth, guess) in sides.items():
        peaks[f"measured_{name}_mib"] = truth and round(truth / MIB, 3)
        peaks[f"simulated_{name}_mib"] = guess and round(guess / MIB, 3)
        peaks[f"{name}_difference_percent"] = round(100 * (guess / truth - 1), 4) if truth and guess else None
    most = found.bytes_with_workspaces
    if one is not None and most is not None:
        more = (most - one.device_bytes) / MIB
        peaks["simulated_reserved_with_workspaces_mib"] = round(one.peak_reserved_bytes / MIB + more, 3)
    return Row(
        program=program,
        command=CASES[program][1],
        device_name=about["device_name"],
        driver=about.get("driver", ""),
        torch=torch.__version__,
        transformers=about["transformers"],
        with_values=found.with_values,
        verdict=found.verdict.value,
        failure=real.get("failure", ""),
        **peaks,
    )


def main() -> int:
    """Run what the table does not have; return the exit code, as exit_code_of() does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--rows", default="", help="a regular expression")
    parser.add_argument("--at_once", type=int, default=8, help="programs that run at a time")
    return exit_code_of(lambda: _run(parser.parse_args()))


def _run(given: argparse.Namespace) -> None:
    about = environment(find_device("cuda"))
    card = find_card(about["device_name"]).name
    names = [name for name, (_, command) in CASES.items() if command.startswith("python ")]
    chosen = [name for name in names if re.search(given.rows, name)]
    add_missing(given.table, Row, chosen, lambda name: row(name, card, about), given.at_once)


if __name__ == "__main__":
    sys.exit(main())
