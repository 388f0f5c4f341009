"""Replays of every sampler on a table of a whole measured space: trials, seconds, misses and bounds.

    python benchmarks/search_replay.py benchmarks/search_table_cpu_gpt2-nano_<date>.csv

writes search_replay_<name>.md and .csv next to the table. A replayed trial is one of the configuration's measured runs,
drawn by the seed; it ends by the same rule for every sampler, and costs the seconds of that run until then. Only the
predictive sampler measures a configuration again: then another run is drawn. An interrupted call resumes.
"""

import argparse
import csv
import math
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from exit_code import Deadline, exit_code_of
from replay.page import page, summary
from replay.search import OPTUNAS, REPLAYS, Replayed, replay
from replay.table import FURTHER_SHARES, SHARES_THAT_FIT, budgets, count_work, read


def replayed(file: Path) -> dict[tuple[str, int, int], Replayed]:
    """Return the results in the file of an interrupted call, by task."""
    if not file.exists():
        return {}
    kinds = {"sampler": str, "certificate_holds": "True".__eq__, "budget_bytes": int, "seed": int, "over_budget": int}
    kinds |= dict.fromkeys(("trials_to_near", "trials"), int)
    with file.open(newline="") as rows:
        read = [
            Replayed(**{k: None if v == "" else kinds.get(k, float)(v) for k, v in row.items()})
            for row in csv.DictReader(rows)
        ]
    return {(one.sampler, one.budget_bytes, one.seed): one for one in read}


def _left(
    tasks: Sequence[tuple[str, int, int]], results: Mapping[tuple[str, int, int], Replayed], most_trials: float
) -> list[tuple[str, int, int]]:
    """Return the tasks without a result, and those of Optuna's samplers that were given up before so many trials."""

    def was_given_up(result: Replayed) -> bool:
        return result.sampler in OPTUNAS and result.trials_to_near is None and result.trials < most_trials

    return [task for task in tasks if task not in results or was_given_up(results[task])]


def main(words: Sequence[str] | None = None) -> int:
    """Replay the missing tasks and write the table; return the exit code: 0, 2 invalid input, 75 tasks are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--other_seeds", type=int, help="seeds of the samplers that are not ours; by default as many")
    parser.add_argument("--other_trials", type=int, help="trials after which Optuna's are given up; by default never")
    parser.add_argument("--suffix", default="", help="what the names of the written files end with: another method's")
    parser.add_argument("--minutes", type=float, help="begin no replay after this many minutes")
    given = parser.parse_args(words)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> int:
    deadline = Deadline(given.minutes)
    count_work(given.table)
    entries = read(given.table)
    searches = [
        *product(budgets(entries, SHARES_THAT_FIT), REPLAYS),
        *product(budgets(entries, FURTHER_SHARES), ["predictive"]),
    ]
    seeds = {"predictive": given.seeds}
    other_seeds = given.seeds if given.other_seeds is None else given.other_seeds
    tasks = [(name, budget, seed) for budget, name in searches for seed in range(seeds.get(name, other_seeds))]
    name = given.table.stem.replace("search_table", "search_replay")
    output = given.table.with_name(f"{name}{given.suffix}.csv")
    results = replayed(output)
    most_trials = min(given.other_trials or math.inf, len(entries))
    left = _left(tasks, results, most_trials)
    with (
        ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool,
        output.open("a", newline="") as file,
    ):
        writer = csv.DictWriter(file, [field.name for field in fields(Replayed)], lineterminator="\n")
        if not results:
            writer.writeheader()
        run = partial(replay, given.table, most_trials)
        for task, result in zip(left, pool.map(run, left), strict=True):
            results[task] = result
            writer.writerow(asdict(result))
            file.flush()
            if deadline.is_over:
                pool.shutdown(cancel_futures=True)
                break
    num_left = len(_left(tasks, results, most_trials))
    if not num_left:
        command = f"python benchmarks/search_replay.py {given.table} --seeds {given.seeds}"
        for name in ("other_seeds", "other_trials", "suffix"):
            command += f" --{name} {getattr(given, name)}" if getattr(given, name) not in (None, "") else ""
        shown = list(summary([results[task] for task in tasks]))
        output.with_suffix(".md").write_text(page(shown, given.table, entries, command))
    return num_left


if __name__ == "__main__":
    sys.exit(main())
