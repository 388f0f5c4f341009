"""Replays of the predictive search with several workers on tables of whole measured spaces: its time and its trials.

    python benchmarks/search_replay_parallel.py benchmarks/search_table_cpu_gpt2-nano_<date>.csv ...

writes search_replay_parallel_<date>.md and .csv next to the first table. Each worker starts the next trial as soon as
its own has ended, given what has been measured and what is running then; a trial takes as long as that run of the table
took. There is no limit of trials, since 16 workers start as many at once. An interrupted call resumes.
"""

import argparse
import csv
import datetime
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
from exit_code import Deadline, exit_code_of
from replay.parallel import ReplayedInParallel, replay
from replay.table import SHARES_THAT_FIT, budgets, count_work, read

from pipeline.base.errors import InvalidInputError

Task = tuple[Path, int, int, int]
"""Table, budget in bytes, workers and seed."""
COLUMNS = [field.name for field in fields(ReplayedInParallel)]


def main(words: Sequence[str] | None = None) -> int:
    """Replay what is missing and write the table; return the exit code: 0, 2 invalid input, 75 replays are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--minutes", type=float, help="begin no replay after this many minutes")
    parser.add_argument("--date", default=f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}", help="of the files")
    given = parser.parse_args(words)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> int:
    deadline = Deadline(given.minutes)
    if min(given.workers) < 1:
        raise InvalidInputError(f"--workers must be at least 1, and is {min(given.workers)}; name others")
    output = given.tables[0].with_name(f"search_replay_parallel_{given.date}.csv")
    for table in given.tables:
        count_work(table)
    tasks = [
        (table, budget, workers, seed)
        for table in given.tables
        for budget, workers, seed in product(budgets(read(table), SHARES_THAT_FIT), given.workers, range(given.seeds))
    ]
    _replay([task for task in tasks if _key(task) not in _replayed(output)], output, deadline)
    num_left = len({_key(task) for task in tasks} - _replayed(output))
    if not num_left:
        words = [*map(str, given.tables), "--seeds", str(given.seeds)]
        output.with_suffix(".md").write_text(_page(pd.read_csv(output), f"{Path(__file__).name} {' '.join(words)}"))
    return num_left


def _key(task: Task) -> tuple[str, int, int, int]:
    return (task[0].name, *task[1:])


def _replayed(output: Path) -> set[tuple[str, int, int, int]]:
    """Return the replays in the file of an interrupted call."""
    if not output.exists():
        return set()
    with output.open(newline="") as rows:
        return {(r["table"], int(r["budget_bytes"]), int(r["workers"]), int(r["seed"])) for r in csv.DictReader(rows)}


def _replay(tasks: Sequence[Task], output: Path, deadline: Deadline) -> None:
    """Add replays to the file until the time is over."""
    is_new = not output.exists()
    with (
        ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool,
        output.open("a", newline="") as file,
    ):
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for result in pool.map(replay, *zip(*tasks, strict=True)) if tasks else ():
            writer.writerow(asdict(result))
            file.flush()
            if deadline.is_over:
                pool.shutdown(cancel_futures=True)
                return


def _page(results: pd.DataFrame, command: str) -> str:
    """Return the results as Markdown, a line for each table, budget and number of workers."""
    lines = list(_lines(results))
    return "\n".join(
        [
            "# Searches of several workers, replayed",
            "",
            f"Written by `python benchmarks/{command}`. `search_replay_*.md` of the same names describe the tables, "
            "their conditions and what a replay is. Each worker starts the next trial as soon as its own has ended, "
            "without a limit of trials. Times are medians over the seeds, in seconds of the replayed clock; the share "
            "is that of one worker's. The certificate is there once nothing is left that is worth a trial, whatever "
            "still runs. In all: until every trial has ended and the answer was measured once more. Trials include "
            "repeated ones.",
            "",
            f"| {' | '.join(lines[0])} |",
            f"|{'---|' * len(lines[0])}",
            *(f"| {' | '.join(line.values())} |" for line in lines),
            "",
        ]
    )


def _lines(results: pd.DataFrame) -> Iterator[dict[str, str]]:
    """Yield a line for each table, budget and number of workers."""
    for (table, budget), of_budget in results.groupby(["table", "budget_bytes"], sort=False):
        to_certificate = of_budget.groupby("workers").seconds_to_certificate.median()
        for workers, rows in of_budget.groupby("workers"):
            share = to_certificate[workers] / to_certificate[to_certificate.index.min()]
            yield {
                "table": str(table).removeprefix("search_table_").removesuffix(".csv"),
                "budget MiB": f"{budget / 2**20:.1f}",
                "workers": str(workers),
                "searches": str(len(rows)),
                "s to 2 %": f"{rows.seconds_to_near.median():.1f}",
                "s to the certificate": f"{to_certificate[workers]:.1f}",
                "share": f"{100 * share:.0f} %",
                "s in all": f"{rows.seconds.median():.1f}",
                "trials": f"{rows.trials.median():.0f} ({rows.trials.min()} to {rows.trials.max()})",
                "repeated": f"{rows.repeats.median():.0f}",
                "over budget": str(rows.over_budget.sum()),
                "certificate true": _share(rows.certificate_holds),
                "bound": f"{100 * rows.bound.median():.1f} %",
                "bound true": _share(rows.bound_holds),
            }


def _share(holds: "pd.Series[bool]") -> str:
    """Return in how many of the searches that state a bound it is true."""
    stated = holds.dropna()
    return f"{int(stated.astype(bool).sum())} of {len(stated)}"


if __name__ == "__main__":
    sys.exit(main())
