"""A table of a measured space: every run of every configuration, corrected for slow phases of the machine."""

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from search_table import DIMENSIONS

from pipeline.config.entry_points import FOLDER
from pipeline.config.variants import read_yaml
from pipeline.searching.candidates import Candidate

WARMUP_STEPS = int(read_yaml(FOLDER / "search.yaml")["timing_warmup_steps"])
"""First optimizer steps, which are not timed, as in the search."""
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

    @property
    def seconds(self) -> float:
        """Its true seconds per step: the median of the runs' medians."""
        return statistics.median(run.seconds for run in self.runs)


@cache
def read(file: Path) -> tuple[Entry, ...]:
    """Return the configurations of a table in the order of its space, with corrected times."""
    about = json.loads(file.with_suffix(".json").read_text())
    rows = rows_of(file)
    groups: dict[tuple[str, ...], list[tuple[Mapping[str, str], Run]]] = {}
    for row, slowness in zip(rows, slownesses(rows), strict=True):
        steps = tuple(seconds / slowness for seconds in _steps(row))
        run = Run(steps, float(row["seconds_total"]) / slowness - sum(steps))
        groups.setdefault(_key(row), []).append((row, run))
    batch, length = int(about["effective_batch_size"]), int(about["sequence_length"])
    ordered = sorted(groups.items(), key=lambda pair: (int(pair[0][0]), pair[0][1:]))
    return tuple(_entry([row for row, _ in pairs], [run for _, run in pairs], batch, length) for _, pairs in ordered)


def slownesses(rows: Sequence[Mapping[str, str]]) -> list[float]:
    """Return the slowness of the machine around each run, as a ratio to its best.

    A shared machine has slow minutes that do not depend on the configuration. Since the order of the runs is random,
    the median over the runs near in time, each divided by the fastest run of its configuration, estimates them.
    """
    medians = [statistics.median(_steps(row)[WARMUP_STEPS:]) for row in rows]
    fastest: dict[tuple[str, ...], float] = {}
    for row, median in zip(rows, medians, strict=True):
        fastest[_key(row)] = min(median, fastest.get(_key(row), math.inf))
    ratios = [median / fastest[_key(row)] for row, median in zip(rows, medians, strict=True)]
    return [statistics.median(ratios[max(0, n - NEARBY) : n + NEARBY + 1]) for n in range(len(ratios))]


def rows_of(file: Path) -> list[dict[str, str]]:
    """Return the runs of a table that ended, in the order in which they were measured."""
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


def budgets(entries: Sequence[Entry], shares: Sequence[float]) -> list[int]:
    """Return the budgets at which these shares of the space fit."""
    peaks = sorted(entry.peak_bytes for entry in entries)
    return [int(peaks[round(share * len(peaks)) - 1]) for share in shares]
