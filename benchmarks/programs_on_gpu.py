"""Programs of several frameworks on this machine's GPU and on a simulated card like it: their peaks side by side.

    python benchmarks/programs_on_gpu.py TABLE.csv
    python benchmarks/programs_on_gpu.py TABLE.csv --rows 'Trainer|Whisper'
    python benchmarks/programs_on_gpu.py TABLE.csv --simulate_again ENVIRONMENT/bin/python

The programs are those of simulated_scripts.py that take one card. Both runs are of the same environment; several run at
once, which changes no peak of a process's own allocator. It writes what the table does not have; or, without a GPU, it
simulates all rows of the table again, with an interpreter whose torch and packages have the same versions.
"""

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Semaphore
from typing import Any

import torch
from exit_code import exit_code_of
from rows import add_missing
from simulated_scripts import CASES, PROGRAMS

from pipeline.base.units import MIB
from pipeline.memory.device import find_device
from pipeline.prediction.commands.simulation import Simulation, simulate
from pipeline.runtime.environment import environment
from pipeline.simulation.cards import find_card
from pipeline.simulation.run import Simulate

KINDS = ("allocated", "reserved")
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


def simulated(python: Path, words: list[str], card: str, folder: Path) -> Simulation:
    """Return what the script needs of a simulated card."""
    wanted = Simulate(
        command=(str(python), *words),
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
        found = simulated(Path(sys.executable), words, card, Path(folder) / "simulated")
    mib = {name: real.get(f"{name}_bytes") and round(real[f"{name}_bytes"] / MIB, 3) for name in KINDS}
    return Row(
        program=program,
        command=CASES[program][1],
        device_name=about["device_name"],
        driver=about.get("driver", ""),
        torch=torch.__version__,
        transformers=about["transformers"],
        failure=real.get("failure", ""),
        **beside(mib, found),
    )


def beside(measured_mib: Mapping[str, float | None], found: Simulation) -> dict[str, Any]:
    """Return the columns of what was measured and what was simulated."""
    one = found.largest
    columns: dict[str, Any] = {"with_values": found.with_values, "verdict": found.verdict.value}
    for name in KINDS:
        truth = measured_mib[name]
        guess = None if one is None else getattr(one, f"peak_{name}_bytes") / MIB
        columns[f"measured_{name}_mib"] = truth
        columns[f"simulated_{name}_mib"] = guess and round(guess, 3)
        columns[f"{name}_difference_percent"] = round(100 * (guess / truth - 1), 4) if truth and guess else None
    most = found.bytes_with_workspaces
    more = None if one is None or most is None else (most - one.device_bytes + one.peak_reserved_bytes) / MIB
    return {**columns, "simulated_reserved_with_workspaces_mib": more and round(more, 3)}


def again(row: Mapping[str, str], python: Path) -> dict[str, Any]:
    """Return a row of the table with its simulation of today."""
    _, script, *arguments = row["command"].split()
    with tempfile.TemporaryDirectory() as folder:
        words = [str(PROGRAMS / script), *arguments]
        found = simulated(python, words, find_card(row["device_name"]).name, Path(folder))
    made = {**row, **beside({name: float(row[f"measured_{name}_mib"]) for name in KINDS}, found)}
    print(*list(made.values())[:10], sep=", ", flush=True)
    return made


def main() -> int:
    """Run what the table does not have; return the exit code, as exit_code_of() does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--rows", default="", help="a regular expression")
    parser.add_argument("--at_once", type=int, default=8, help="programs that run at a time")
    parser.add_argument("--simulate_again", type=Path, metavar="PYTHON", help="simulate what was measured before")
    return exit_code_of(lambda: _run(parser.parse_args()))


def _run(given: argparse.Namespace) -> None:
    if given.simulate_again:
        with given.table.open(newline="") as file, ThreadPoolExecutor(given.at_once) as pool:
            made = list(pool.map(lambda one: again(one, given.simulate_again), csv.DictReader(file)))
        with given.table.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(made)
        return
    about = environment(find_device("cuda"))
    card = find_card(about["device_name"]).name
    names = [name for name, (_, command) in CASES.items() if command.startswith("python ")]
    chosen = [name for name in names if re.search(given.rows, name)]
    add_missing(given.table, Row, chosen, lambda name: row(name, card, about), given.at_once)


if __name__ == "__main__":
    sys.exit(main())
