"""A table of a measured space: every run of every configuration, corrected for slow phases of the machine."""

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from search_table import DIMENSIONS, SETTINGS, predictions_of

from pipeline.base.errors import InvalidInputError
from pipeline.config.entry_points import FOLDER
from pipeline.config.experiment import make_experiment
from pipeline.config.given import dotted, merged, nested
from pipeline.config.settings import AllSettings
from pipeline.config.variants import read_yaml
from pipeline.memory.work import Work
from pipeline.searching.candidates import Candidate, Works

WARMUP_STEPS = int(read_yaml(FOLDER / "search.yaml")["timing_warmup_steps"])
"""First optimizer steps, which are not timed, as in the search."""
SHARES_THAT_FIT = (0.33, 0.6)
"""Of the space, at the two budgets at which all samplers are replayed."""
FURTHER_SHARES = (0.2, 0.45, 0.75, 0.9, 1.0)
"""Of the space, at the budgets at which only the predictive sampler is replayed, to see how often its bound is true."""
ALL_SHARES = (*SHARES_THAT_FIT, *FURTHER_SHARES)
NEARBY = 3
"""Runs before and after one from which the slowness of the machine is estimated."""


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
    is_plain: bool
    """Whether its settings are the defaults, but for micro-batch, checkpointing and precision."""

    @property
    def seconds(self) -> float:
        """Its true seconds per step: the median of the runs' medians."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def fastest(self) -> float:
        """The seconds per step of the fastest of its runs."""
        return min(run.seconds for run in self.runs)


@cache
def read(file: Path, *, has_further_runs: bool = True) -> tuple[Entry, ...]:
    """Return the configurations of a table in the order of its space, with corrected times.

    Those of search_contenders.py are part of it, unless `has_further_runs` is false.
    """
    about, works, rows = conditions(file), _works(file), rows_of(file)
    names = about["dimensions"]
    runs = _runs(rows, names)
    if has_further_runs and contenders_of(file).exists():
        runs = _joined(runs, _runs(rows_of(contenders_of(file)), names))
    first_rows = {_key(row, names): row for row in reversed(rows)}
    peaks: dict[tuple[str, ...], float] = {}
    for row in rows:
        key = _key(row, names)
        peaks[key] = max(float(row["peak_bytes"]), peaks.get(key, 0.0))
    ordered = sorted(runs, key=lambda key: (int(key[0]), key[1:]))
    return tuple(_entry(first_rows[key], peaks[key], about, works[key], runs[key]) for key in ordered)


def _joined(
    runs: Mapping[tuple[str, ...], tuple[Run, ...]], further: Mapping[tuple[str, ...], tuple[Run, ...]]
) -> dict[tuple[str, ...], tuple[Run, ...]]:
    """Return all runs of each configuration.

    Slowness is relative to the fastest run of a configuration, which is faster among many runs than among few. So the
    further runs are scaled by one number, with which the median contender takes as long as in the table.
    """

    def seconds(some: Sequence[Run]) -> float:
        return statistics.median(run.seconds for run in some)

    scale = statistics.median(seconds(runs[key]) / seconds(some) for key, some in further.items())
    scaled = {
        key: tuple(Run(tuple(scale * one for one in run.seconds_of_steps), run.seconds_of_start) for run in some)
        for key, some in further.items()
    }
    return {key: (*some, *scaled.get(key, ())) for key, some in runs.items()}


def _runs(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> dict[tuple[str, ...], tuple[Run, ...]]:
    """Return the runs of each configuration, corrected for the slowness of the machine around each."""
    runs: dict[tuple[str, ...], tuple[Run, ...]] = {}
    for row, slowness in zip(rows, slownesses(rows, names), strict=True):
        steps = tuple(seconds / slowness for seconds in _steps(row))
        run = Run(steps, float(row["seconds_total"]) / slowness - sum(steps))
        runs[_key(row, names)] = (*runs.get(_key(row, names), ()), run)
    return runs


def contenders_of(file: Path) -> Path:
    """Return the file of the further runs of a table's contenders.

    Raises:
        InvalidInputError: the table has another name than search_table.py gives it.

    """
    if "search_table" not in file.name:
        raise InvalidInputError(f"a table's name has search_table in it, and {file.name} does not; rename it")
    return file.with_name(file.name.replace("search_table", "search_contenders"))


def slownesses(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[float]:
    """Return the slowness of the machine around each run, as a ratio to its best; `names` are the dimensions.

    A shared machine has slow minutes that do not depend on the configuration. Since the order of the runs is random,
    the median over the runs near in time, each divided by the fastest run of its configuration, estimates them.
    """
    medians = [statistics.median(_steps(row)[WARMUP_STEPS:]) for row in rows]
    fastest: dict[tuple[str, ...], float] = {}
    for row, median in zip(rows, medians, strict=True):
        fastest[_key(row, names)] = min(median, fastest.get(_key(row, names), math.inf))
    ratios = [median / fastest[_key(row, names)] for row, median in zip(rows, medians, strict=True)]
    return [statistics.median(ratios[max(0, n - NEARBY) : n + NEARBY + 1]) for n in range(len(ratios))]


def conditions(file: Path) -> dict[str, Any]:
    """Return the conditions of a table, with the dimensions of its space."""
    return {"dimensions": DIMENSIONS, **json.loads(file.with_suffix(".json").read_text())}


def is_whole(file: Path) -> bool:
    """Whether the space is the default one of the search."""
    return "dimensions" in json.loads(file.with_suffix(".json").read_text())


def rows_of(file: Path) -> list[dict[str, str]]:
    """Return the runs of a table that ended, in the order in which they were measured."""
    with file.open(newline="") as lines:
        return [row for row in csv.DictReader(lines) if row["outcome"] in ("ok", "over_budget")]


def count_work(file: Path) -> None:
    """Write the work of each configuration of a table, as its trace counts it, next to the table if it is not there.

    Raises:
        InvalidInputError: there is no such table.

    """
    if not file.exists():
        raise InvalidInputError(
            f"the table must exist, and {file} does not; measure it: python benchmarks/search_table.py"
        )
    if _work_file(file).exists():
        return
    about = conditions(file)
    names = about["dimensions"]
    keys = sorted({_key(row, names) for row in rows_of(file)})
    common = {name: value for name, value in about.items() if name in SETTINGS}
    experiments = [
        make_experiment(merged(nested(common), nested(dict(zip(names, key, strict=True)))), "search") for key in keys
    ]
    predictions = predictions_of(experiments)
    lines = [
        json.dumps({"choice": key, "pass": asdict(one.pass_work), "update": asdict(one.update_work)})
        for key, one in ((key, predictions[number]) for number, key in enumerate(keys))
    ]
    _work_file(file).write_text("\n".join(lines) + "\n")


def _works(file: Path) -> dict[tuple[str, ...], Works]:
    """Return the work of a pass and of the update of each configuration."""
    lines = [json.loads(line) for line in _work_file(file).read_text().splitlines()]
    return {tuple(line["choice"]): (Work(**line["pass"]), Work(**line["update"])) for line in lines}


def _work_file(file: Path) -> Path:
    return file.with_name(f"{file.stem}_work.jsonl")


def _key(row: Mapping[str, str], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(row[name] for name in names)


def _steps(row: Mapping[str, str]) -> list[float]:
    return [float(seconds) for seconds in row["seconds_of_steps"].split()]


def _entry(
    row: Mapping[str, str],
    peak_bytes: float,
    about: Mapping[str, Any],
    works: Works,
    runs: tuple[Run, ...],
) -> Entry:
    batch = int(about["effective_batch_size"])
    predicted, size = int(row["predicted_peak_bytes"]), int(row["micro_batch_size"])
    candidate = Candidate(
        choice={**{name: row[name] for name in about["dimensions"]}, "micro_batch_size": size},
        micro_batch_size=size,
        num_passes=batch // size,
        num_tokens=batch * int(about["sequence_length"]),
        pass_work=works[0],
        update_work=works[1],
        predicted_bytes=predicted,
    )
    defaults = dict(dotted(AllSettings().model_dump()))
    is_plain = all(row[name] == str(defaults[name]) for name in about["dimensions"] if name not in DIMENSIONS)
    return Entry(candidate, peak_bytes, runs, is_plain)


def budgets(entries: Sequence[Entry], shares: Sequence[float]) -> list[int]:
    """Return the budgets at which these shares of the space fit."""
    peaks = sorted(entry.peak_bytes for entry in entries)
    return [int(peaks[round(share * len(peaks)) - 1]) for share in shares]
