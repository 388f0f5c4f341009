"""Every sampler replayed on a table of a whole space that was really measured: trials, seconds, misses and proofs.

    python benchmarks/search_replay.py benchmarks/search_table_cpu_gpt2-nano_<date>.csv

writes search_replay_<name>.md and .csv beside the table. A replayed trial is one of the configuration's measured runs,
drawn by the seed; it ends by the same rule for every sampler, and costs what that run cost until then. No sampler is
given a configuration twice. An interrupted call goes on where it was.
"""

import argparse
import csv
import json
import math
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import optuna
from search_table import DIMENSIONS

from pipeline.searching.candidates import Candidate
from pipeline.searching.choose import choose, distributions_of
from pipeline.searching.judge import CONSTRAINT
from pipeline.searching.length import TrialLength
from pipeline.searching.predictive import Measured, Rules, look_ahead
from pipeline.space import Choice, Space

WARMUP_STEPS, PRECISION_PERCENT = 3, 2.0
FAR_APART = 100_003
"""Factor of the seeds that samplers are given, since the next trial of a search takes the next seed."""
NEARBY = 3
"""Runs before and after one that tell how slow the machine was."""
NEAR = 0.02
"""Share of its time by which an answer may be slower than the best to count as found."""
SHARES_THAT_FIT = (0.33, 0.6)
"""Of the space, at the two budgets at which all samplers are replayed."""
FURTHER_SHARES = (0.2, 0.45, 0.75, 0.9, 1.0)
"""Of the space, at the budgets at which the project's own sampler is replayed, to see how often its bound is true."""
OPTUNAS = ("tpe", "gp", "random", "brute", "nsga2")
HABITS = {
    f"doubling, {precision}{', checkpointed' if policy != 'none' else ''}": (policy, precision)
    for precision in ("fp32", "bf16")
    for policy in ("none", "every_layer")
}


@dataclass(frozen=True)
class Run:
    """One measured run of a configuration."""

    seconds_of_steps: tuple[float, ...]
    seconds_of_start: float

    @property
    def seconds(self) -> float:
        """Its seconds per step."""
        return statistics.median(self.seconds_of_steps[WARMUP_STEPS:])


@dataclass(frozen=True)
class Entry:
    """One configuration of the table."""

    candidate: Candidate
    peak_bytes: float
    runs: tuple[Run, ...]

    @property
    def seconds(self) -> float:
        """Its true seconds per step: the median of the runs' medians."""
        return statistics.median(run.seconds for run in self.runs)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What one search came to."""

    sampler: str
    budget_bytes: int
    seed: int
    trials_to_near: int | None
    """Trials until the incumbent was near the optimum, all counted; None where it never was."""
    seconds_to_near: float | None
    trials: int
    """All, where the sampler stops of its own accord."""
    seconds: float
    over_budget: int
    distance: float
    """Share by which the last incumbent is slower than the optimum."""
    bound: float | None
    """Share of its time that the search said the optimum may be faster by; None where it said nothing."""
    certificate_holds: bool | None
    """Whether the optimum lies within that bound."""


@cache
def read(file: Path) -> tuple[Entry, ...]:
    """Return the configurations of a table, in the order of its space, their times as if the machine never slowed."""
    about = json.loads(file.with_suffix(".json").read_text())
    rows = _rows(file)
    groups: dict[tuple[str, ...], list[tuple[Mapping[str, str], Run]]] = {}
    for row, slowness in zip(rows, slownesses(rows), strict=True):
        steps = tuple(seconds / slowness for seconds in _steps(row))
        run = Run(steps, float(row["seconds_total"]) / slowness - sum(steps))
        groups.setdefault(_key(row), []).append((row, run))
    batch, length = int(about["effective_batch_size"]), int(about["sequence_length"])
    ordered = sorted(groups.items(), key=lambda pair: (int(pair[0][0]), pair[0][1:]))
    return tuple(_entry([row for row, _ in pairs], [run for _, run in pairs], batch, length) for _, pairs in ordered)


def slownesses(rows: Sequence[Mapping[str, str]]) -> list[float]:
    """Return how slow the machine was around each run: a share of its best, from the runs before and after it.

    A shared machine has slow minutes that have nothing to do with what it runs. Since the order is random, the median
    of the runs near in time, each over the fastest run of its own configuration, tells them.
    """
    medians = [statistics.median(_steps(row)[WARMUP_STEPS:]) for row in rows]
    fastest: dict[tuple[str, ...], float] = {}
    for row, median in zip(rows, medians, strict=True):
        fastest[_key(row)] = min(median, fastest.get(_key(row), math.inf))
    ratios = [median / fastest[_key(row)] for row, median in zip(rows, medians, strict=True)]
    return [statistics.median(ratios[max(0, n - NEARBY) : n + NEARBY + 1]) for n in range(len(ratios))]


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return [row for row in csv.DictReader(lines) if row["outcome"] in ("ok", "over_budget")]


def _key(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in DIMENSIONS)


def _steps(row: Mapping[str, str]) -> list[float]:
    return [float(seconds) for seconds in row["seconds_of_steps"].split()]


def _entry(rows: Sequence[Mapping[str, str]], runs: Sequence[Run], batch: int, length: int) -> Entry:
    row = rows[0]
    predicted, size = int(row["predicted_peak_bytes"]), int(row["micro_batch_size"])
    candidate = Candidate(
        choice={**{name: row[name] for name in DIMENSIONS}, "micro_batch_size": size},
        micro_batch_size=size,
        num_passes=batch // size,
        num_tokens=batch * length,
        flops=float(row["flops_per_sequence"]),
        precision=row["precision"],
        predicted_bytes=predicted,
        fits=lambda budget_bytes: predicted <= budget_bytes,
    )
    return Entry(candidate, max(float(row["peak_bytes"]) for row in rows), tuple(runs))


class Search:
    """A search that is being replayed."""

    def __init__(self, entries: Sequence[Entry], sampler: str, budget_bytes: int, seed: int) -> None:
        self.entries, self.sampler, self.budget_bytes, self.seed = entries, sampler, budget_bytes, seed
        self.measured: dict[int, float] = {}
        self.seconds = 0.0
        self._random = random.Random(f"{sampler} {budget_bytes} {seed}")  # noqa: S311  nothing secret
        self._optimum = min(entry.seconds for entry in entries if entry.peak_bytes <= budget_bytes)
        self._near: tuple[int, float] | None = None

    @property
    def over_budget(self) -> list[int]:
        """Return the numbers of those measured that do not fit."""
        return [number for number in self.measured if self.entries[number].peak_bytes > self.budget_bytes]

    @property
    def incumbent(self) -> int | None:
        """Return the number of the fastest measured that fits."""
        fitting = [number for number in self.measured if self.entries[number].peak_bytes <= self.budget_bytes]
        return min(fitting, key=lambda number: self.measured[number], default=None)

    @property
    def is_near(self) -> bool:
        """Whether the incumbent has been near the optimum."""
        return self._near is not None

    def measure(self, number: int) -> None:
        """Take a trial."""
        run, best = self._random.choice(self.entries[number].runs), self.incumbent
        enough = TrialLength(WARMUP_STEPS, PRECISION_PERCENT, None if best is None else self.measured[best])
        lengths = range(1, len(run.seconds_of_steps) + 1)
        length = next((n for n in lengths if enough(run.seconds_of_steps[:n])), lengths[-1])
        steps = run.seconds_of_steps[:length]
        self.measured[number] = statistics.median(steps[WARMUP_STEPS:])
        self.seconds += run.seconds_of_start + sum(steps)
        best = self.incumbent
        if self._near is None and best is not None and self.entries[best].seconds <= self._optimum * (1 + NEAR):
            self._near = (len(self.measured), self.seconds)

    def confirm(self) -> None:
        """Measure the fastest again, as the search does when it checks its answer, until the fastest is so by both."""
        confirmed = set[int]()
        while (best := self.incumbent) is not None and best not in confirmed:
            run = self._random.choice(self.entries[best].runs)
            self.measured[best] = math.sqrt(self.measured[best] * run.seconds)
            self.seconds += run.seconds_of_start + sum(run.seconds_of_steps)
            confirmed.add(best)

    def known(self) -> Measured:
        """Return what has been measured as the sampler knows it."""
        tokens = self.entries[0].candidate.num_tokens
        return Measured(
            log_seconds={number: math.log(seconds / tokens) for number, seconds in self.measured.items()},
            peak_bytes={number: self.entries[number].peak_bytes for number in self.measured},
            over_budget=frozenset(self.over_budget),
            failed=frozenset(),
            running=frozenset(),
        )

    def result(self, bound: float | None = None) -> Replayed:
        """Return what it came to; `bound` is what it states at its end."""
        best = self.incumbent
        distance = math.inf if best is None else self.entries[best].seconds / self._optimum - 1
        return Replayed(
            sampler=self.sampler,
            budget_bytes=self.budget_bytes,
            seed=self.seed,
            trials_to_near=self._near[0] if self._near else None,
            seconds_to_near=self._near[1] if self._near else None,
            trials=len(self.measured),
            seconds=self.seconds,
            over_budget=len(self.over_budget),
            distance=distance,
            bound=bound,
            certificate_holds=None if bound is None or best is None else 1 - 1 / (1 + distance) <= bound,
        )


def predictive(search: Search) -> Replayed:
    """Replay the project's own sampler until it stops."""
    candidates = [entry.candidate for entry in search.entries]
    rules = Rules(budget_bytes=search.budget_bytes)
    while True:
        outlook = look_ahead(candidates, search.known(), rules)
        if outlook.next is None or not outlook.holds:
            break
        search.measure(outlook.next)
    search.confirm()
    outlook = look_ahead(candidates, search.known(), rules)
    return search.result(None if outlook.bound is None or not outlook.holds else max(outlook.bound, rules.gap))


def of_optuna(search: Search) -> Replayed:
    """Replay one of Optuna's samplers, which is told peaks as a constraint in bytes, until it is near the optimum."""
    choices: list[Choice] = [entry.candidate.choice for entry in search.entries]
    space = Space({name: tuple(dict.fromkeys(choice[name] for choice in choices)) for name in choices[0]})
    numbers = {tuple(choice.values()): number for number, choice in enumerate(choices)}
    told = optuna.create_study(direction="maximize")
    while not search.is_near:
        taken = [choices[number] for number in search.measured]
        choice = choose(choices, space, told.trials, taken, ("maximize",), search.sampler, search.seed * FAR_APART)
        if choice is None:
            break
        number = numbers[tuple(choice.values())]
        search.measure(number)
        told.enqueue_trial(choice)
        trial = told.ask(distributions_of(space))
        trial.set_constraint(CONSTRAINT, search.entries[number].peak_bytes - search.budget_bytes)
        told.tell(trial, search.entries[number].candidate.num_tokens / search.measured[number])
    return search.result()


def by_habit(search: Search) -> Replayed:
    """Replay what people do: double the micro-batch until it does not fit, then accumulate with the one before."""
    policy, precision = HABITS[search.sampler]
    size = 1
    for number, entry in enumerate(search.entries):
        choice = entry.candidate.choice
        if (choice["checkpointing"], choice["precision"]) == (policy, precision) and choice["micro_batch_size"] == size:
            search.measure(number)
            size *= 2
            if search.over_budget:
                break
    return search.result()


REPLAYS: Mapping[str, Callable[[Search], Replayed]] = {
    "predictive": predictive,
    **dict.fromkeys(OPTUNAS, of_optuna),
    **dict.fromkeys(HABITS, by_habit),
}


def replay(file: Path, task: tuple[str, int, int]) -> Replayed:
    """Replay one search: (sampler, budget in bytes, seed)."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return REPLAYS[task[0]](Search(read(file), *task))


def budgets(entries: Sequence[Entry], shares: Sequence[float]) -> list[int]:
    """Return the budgets at which these shares of the space fit."""
    peaks = sorted(entry.peak_bytes for entry in entries)
    return [int(peaks[round(share * len(peaks)) - 1]) for share in shares]


def summary(results: Sequence[Replayed]) -> Iterator[dict[str, Any]]:
    """Yield a line for each budget and sampler."""
    for budget, sampler in dict.fromkeys((result.budget_bytes, result.sampler) for result in results):
        rows = [one for one in results if (one.budget_bytes, one.sampler) == (budget, sampler)]
        found = [one for one in rows if one.trials_to_near is not None]
        proven = [one.certificate_holds for one in rows if one.certificate_holds is not None]
        yield {
            "budget MiB": f"{budget / 2**20:.1f}",
            "sampler": sampler,
            "searches": len(rows),
            "found": f"{100 * len(found) / len(rows):.0f} %",
            "trials to 2 %": _spread([one.trials_to_near or 0 for one in found], "{:.0f}"),
            "seconds to 2 %": _spread([one.seconds_to_near or 0.0 for one in found], "{:.1f}"),
            "trials in all": _spread([one.trials for one in rows], "{:.0f}") if sampler not in OPTUNAS else "",
            "over budget": f"{statistics.fmean(one.over_budget for one in rows):.2f}",
            "distance": "" if sampler in OPTUNAS else f"{100 * statistics.median(o.distance for o in rows):.1f} %",
            "bound": _spread([100 * one.bound for one in rows if one.bound is not None], "{:.1f} %"),
            "bound true": f"{100 * statistics.fmean(proven):.1f} % of {len(proven)}" if proven else "",
        }


def _spread(values: Sequence[float], form: str) -> str:
    """Return median and range."""
    if not values:
        return ""
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} to {form.format(max(values))})"


def page(lines: Sequence[Mapping[str, Any]], file: Path, entries: Sequence[Entry], command: str) -> str:
    """Return the table as Markdown."""
    about = json.loads(file.with_suffix(".json").read_text())
    slow = slownesses(_rows(file))
    apart = [abs(math.log(entry.runs[0].seconds / entry.runs[-1].seconds)) for entry in entries]
    off = max(abs((entry.candidate.predicted_bytes or 0) / entry.peak_bytes - 1) for entry in entries)
    names = list(lines[0])
    return "\n".join(
        [
            f"# Samplers replayed on {file.name}",
            "",
            f"Written by `{command}`. The table holds {len(entries)} configurations, each measured "
            f"{min(len(entry.runs) for entry in entries)} times in random order; two runs of one differ by "
            f"{100 * statistics.median(apart):.1f} % in the median; predicted peaks are off by at most "
            f"{100 * off:.3f} %. Times are divided by how slow the machine was just then: the median of the seven runs "
            f"around, each over the fastest of its configuration (at most {max(slow):.2f}, above 1.05 in "
            f"{sum(s > 1.05 for s in slow)} of {len(slow)} runs).",
            "",
            "| what | value |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in about.items()),
            "",
            "A search has found what it seeks once its incumbent is within 2 % of the best configuration that fits; "
            "trials that did not fit count. Median, and range in brackets, over the seeds. Optuna's samplers are "
            "followed until they have found it and are never given a configuration twice; the others stop of their own "
            "accord, predictive also where its law of time does not hold: then it states no bound. A bound is true "
            "where the best configuration lies within it; it is stated after the answer was measured a second time.",
            "",
            f"| {' | '.join(names)} |",
            f"|{'---|' * len(names)}",
            *(f"| {' | '.join(str(value) for value in line.values())} |" for line in lines),
            "",
        ]
    )


def replayed(file: Path) -> dict[tuple[str, int, int], Replayed]:
    """Return what the file has of an earlier, interrupted call, by task."""
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


def main() -> None:
    """Replay what is not replayed yet, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--seeds", type=int, default=100)
    given = parser.parse_args()
    if not given.table.exists():
        parser.error(f"the table must exist, and {given.table} does not; measure it: python benchmarks/search_table.py")
    entries = read(given.table)
    searches = [
        *product(budgets(entries, SHARES_THAT_FIT), REPLAYS),
        *product(budgets(entries, FURTHER_SHARES), ["predictive"]),
    ]
    tasks = [(name, budget, seed) for budget, name in searches for seed in range(given.seeds)]
    output = given.table.with_name(given.table.name.replace("search_table", "search_replay"))
    results = replayed(output)
    left = [task for task in tasks if task not in results]
    with (
        ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool,
        output.open("a", newline="") as file,
    ):
        writer = csv.DictWriter(file, [field.name for field in fields(Replayed)], lineterminator="\n")
        if not results:
            writer.writeheader()
        for task, result in zip(left, pool.map(partial(replay, given.table), left, chunksize=8), strict=True):
            results[task] = result
            writer.writerow(asdict(result))
            file.flush()
    command = f"python benchmarks/search_replay.py {given.table} --seeds {given.seeds}"
    shown = list(summary([results[task] for task in tasks]))
    output.with_suffix(".md").write_text(page(shown, given.table, entries, command))


if __name__ == "__main__":
    main()
