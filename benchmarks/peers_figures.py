"""The runs of benchmarks/peers.py, as rows of its file: grouped by peer, and compared."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from peer_run import PEERS

from pipeline.base.results import Outcome

Row = Mapping[str, str]
Name = tuple[str, str]
"""Model and configuration."""
RESAMPLES = 10_000
"""Draws of the bootstrap."""


@dataclass(frozen=True)
class Ratio:
    """How much faster one peer is than another: median over the rounds, and the 95 % interval of that."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def by_peer(rows: Sequence[Row], name: Name) -> dict[str, list[Row]]:
    """Return the completed runs of a model and configuration, peer by peer; without peers that have none."""
    done = [row for row in rows if (row["model"], row["configuration"]) == name and Outcome(row["outcome"]).completed]
    runs = {peer: [row for row in done if row["peer"] == peer] for peer in PEERS}
    return {peer: of_peer for peer, of_peer in runs.items() if of_peer}


def speed(runs: Sequence[Row], others: Sequence[Row]) -> Ratio | None:
    """Return how much faster `runs` are than `others` in the same rounds; None where they share none."""
    of_others = {row["round"]: float(row["seconds_per_step"]) for row in others}
    shared = [row for row in runs if row["round"] in of_others]
    if not shared:
        return None
    ratios = [of_others[row["round"]] / float(row["seconds_per_step"]) for row in shared]
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return Ratio(statistics.median(ratios), float(low), float(high))


def numbers(row: Row, column: str) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return the numbers, one a step, in a column."""
    return np.array(row[column].split(), dtype=np.float64)


def peak_mib(runs: Sequence[Row]) -> float:
    """Return the median of their peaks of allocated memory."""
    return statistics.median(float(row["peak_allocated_mib"]) for row in runs)
