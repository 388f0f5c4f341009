"""Replays of the predictive sampler with noise that is known: is the stated bound true, and how tight is it?

    python benchmarks/search_noise.py benchmarks/search_table_whole_cpu_*.csv

writes search_noise_<date>.md and .csv next to the tables. The true time of a configuration is the median of its runs in
the table. A replayed run takes that time, with noise that all of its steps share and noise of each step.
"""

import argparse
import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from exit_code import exit_code_of
from replay.search import Replayed, Search, predictive
from replay.table import Entry, Run, budgets, count_work, read

NOISES = {
    "quiet: 2 % and 2 %": (0.02, 0.02),
    "steps: 2 % and 10 %": (0.02, 0.1),
    "runs: 10 % and 3 %": (0.1, 0.03),
}
"""Standard deviations of the time from run to run, and from step to step within a run, as fractions."""
SHARES = (0.33, 0.6, 0.95)
"""Of the space, which fit the three budgets."""
NUM_STEPS = 10
SMALL_BOUND = 0.05


@dataclass(frozen=True, kw_only=True)
class Task:
    """One search."""

    table: str
    share: float
    noise: str
    seed: int


class NoisySearch(Search):
    """A replayed search whose runs are drawn around the true times of a table."""

    def __init__(self, entries: Sequence[Entry], budget_bytes: int, task: Task) -> None:
        super().__init__(entries, "predictive", budget_bytes, task.seed)
        self._of_run, self._of_step = NOISES[task.noise]

    def _draw(self, number: int) -> Run:
        """Return a run with noise."""
        entry, random = self.entries[number], self._random
        seconds = entry.seconds * math.exp(random.gauss(0, self._of_run))
        steps = tuple(seconds * math.exp(random.gauss(0, self._of_step)) for _ in range(NUM_STEPS))
        return Run(steps, entry.runs[0].seconds_of_start)


def replay(folder: Path, task: Task) -> Replayed:
    """Replay one search."""
    entries = read(folder / task.table)
    return predictive(NoisySearch(entries, budgets(entries, (task.share,))[0], task))


def summary(results: Sequence[tuple[Task, Replayed]], key: Callable[[Task], tuple[str, ...]]) -> list[dict[str, Any]]:
    """Return a line for each value of `key`."""
    lines = []
    for group in dict.fromkeys(key(task) for task, _ in results):
        rows = [result for task, result in results if key(task) == group]
        bounds = [row.bound for row in rows if row.bound is not None]
        true = [row.certificate_holds for row in rows if row.certificate_holds is not None]
        lines.append(
            {
                "table, noise": ", ".join(group),
                "searches": len(rows),
                "bound, median": f"{100 * statistics.median(bounds):.1f} %",
                "at most 5 %": f"{100 * statistics.fmean(bound <= SMALL_BOUND for bound in bounds):.0f} %",
                "bound true": f"{100 * statistics.fmean(true):.1f} % of {len(true)}",
                "distance, mean": f"{100 * statistics.fmean(row.distance for row in rows):.1f} %",
                "worst": f"{100 * max(row.distance for row in rows):.0f} %",
                "trials, median": f"{statistics.median(row.trials for row in rows):.0f}",
                "seconds, median": f"{statistics.median(row.seconds for row in rows):.0f}",
            }
        )
    return lines


def page(results: Sequence[tuple[Task, Replayed]], command: str) -> str:
    """Return the tables as Markdown."""
    parts = ["# The bound of a search with noise that is known", f"Written by `{command}`. {' '.join(ABOUT.split())}"]
    for key in (lambda task: (task.noise,), lambda task: (task.table.removesuffix(".csv"), task.noise)):
        lines = summary(results, key)
        rows = [list(lines[0]), ["---"] * len(lines[0]), *(list(map(str, line.values())) for line in lines)]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts) + "\n"


ABOUT = """
The true time of a configuration is the median of its runs in the table. A replayed run takes that time, with noise that
all of its steps share (the first number) and noise of each of its 10 steps (the second). Budgets at which 33, 60 and
95 % of the space fit. The bound is stated after the answer was measured once more, and is true if the best
configuration that fits lies within it; distance is by how much the answer is slower than that one.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Replay all searches and write the tables; return the exit code: 0, or 2 for invalid input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args(words)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> int:
    for table in given.tables:
        count_work(table)
    tasks = [
        Task(table=table.name, share=share, noise=noise, seed=seed)
        for table, noise, seed, share in product(given.tables, NOISES, range(given.seeds), SHARES)
    ]
    folder = given.tables[0].parent
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool:
        results = list(zip(tasks, pool.map(replay, [folder] * len(tasks), tasks), strict=True))
    output = folder / f"search_noise_{time.strftime('%Y-%m-%d')}.csv"
    with output.open("w", newline="") as file:
        lines = [asdict(task) | asdict(result) for task, result in results]
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    names = " ".join(f"benchmarks/{table.name}" for table in given.tables)
    output.with_suffix(".md").write_text(
        page(results, f"python benchmarks/search_noise.py {names} --seeds {given.seeds}")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
