"""Measure again the configurations of a table that may be the fastest at a budget, to know which one is.

    python benchmarks/search_contenders.py benchmarks/search_table_whole_cpu_qwen3-nano_<date>.csv

writes search_contenders_<name>.csv and .json next to the table; a replay takes them as further runs of it. Two runs
of a configuration on a shared machine differ by more than the fastest configurations do, so the fastest by two runs
is the luckiest. The contenders are those with a run at most 20 % slower than the fastest that fits, at any of the
budgets of a replay; each is measured equally often, all in random order. The same command resumes an interrupted one.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from exit_code import Deadline, exit_code_of
from journal import Journal
from replay.table import ALL_SHARES, Entry, budgets, conditions, contenders_of, count_work, read
from search_table import COLUMNS, SETTINGS, measure

from pipeline.config.experiment import make_experiment
from pipeline.config.given import merged, nested
from pipeline.memory.device import find_device
from pipeline.runtime.environment import environment

SHARE_SLOWER = 0.2
"""By how much the faster run of a contender may be slower than the fastest run that fits."""


def main(words: Sequence[str] | None = None) -> int:
    """Measure them; return the exit code, as exit_code_of() does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--minutes", type=float, help="begin no run after this many minutes")
    given = parser.parse_args(words)
    return exit_code_of(lambda: _run(given))


def contenders(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the choices of those that may be the fastest at a budget."""
    numbers = set[int]()
    for budget in budgets(entries, ALL_SHARES):
        fitting = {number: entry.fastest for number, entry in enumerate(entries) if entry.peak_bytes <= budget}
        limit = min(fitting.values()) * (1 + SHARE_SLOWER)
        numbers |= {number for number, seconds in fitting.items() if seconds <= limit}
    return [dict(entries[number].candidate.choice) for number in sorted(numbers)]


def _run(given: argparse.Namespace) -> int:
    deadline = Deadline(given.minutes)
    count_work(given.table)
    about = conditions(given.table)
    common = {name: about[name] for name in SETTINGS if name in about}
    choices = contenders(read(given.table, has_further_runs=False))
    experiments = [make_experiment(merged(nested(common), nested(choice)), "search") for choice in choices]
    now = {**environment(find_device(common["device"])), "threads": torch.get_num_threads(), **common}
    decisive = json.dumps({name: value for name, value in now.items() if not name.startswith("git_")})
    output = contenders_of(given.table)
    journal = Journal.open(output, ("repeat", *about["dimensions"], *COLUMNS), (), {"": decisive})
    output.with_suffix(".json").write_text(json.dumps(now, indent=1) + "\n")
    return measure(choices, experiments, journal, given.repeats, deadline)


if __name__ == "__main__":
    sys.exit(main())
