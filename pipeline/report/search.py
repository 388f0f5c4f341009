"""A search: its trials as a table, over time, and in the plane of memory and throughput."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from pipeline.metrics import MIB
from pipeline.report.overview import colour, to_png


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One measured configuration."""

    number: int
    choice: Mapping[str, Any]
    """A value for each dimension, by its setting's dotted name."""
    outcome: str
    detail: str | None
    fits: bool
    peak_bytes: int | None
    """The peak that the budget limits."""
    figures: Mapping[str, float]
    """Summary metrics, named as in MLflow."""

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput, where it was measured to the end."""
        return self.figures.get("tokens_per_second") if self.outcome in ("ok", "over_budget") else None


def in_words(choice: Mapping[str, Any]) -> str:
    """Return a configuration as people say it: `micro-batch 4, checkpointing none, precision bf16`."""
    return ", ".join(f"{name.replace('micro_batch_size', 'micro-batch')} {value}" for name, value in choice.items())


def trials_frame(rows: Sequence[TrialRow]) -> pd.DataFrame:
    """Return one line a trial."""
    return pd.DataFrame(
        {
            "trial": row.number,
            **row.choice,
            "outcome": row.outcome,
            "fits": row.fits,
            "detail": row.detail,
            **row.figures,
        }
        for row in rows
    )


def trials_table(rows: Sequence[TrialRow], best: TrialRow | None) -> Table:
    """Return the trials, those that fit first and the fastest of them on top."""
    table = Table(title="trials", title_justify="left", box=box.SIMPLE_HEAD)
    for name in rows[0].choice:
        table.add_column(name.replace("micro_batch_size", "micro-batch"), no_wrap=True)
    for name in ("outcome", "peak MiB", "tokens/s", ""):
        table.add_column(name, justify="right" if name in ("peak MiB", "tokens/s") else "left", no_wrap=True)
    for row in sorted(rows, key=lambda row: (not row.fits, -(row.tokens_per_second or 0))):
        peak = "" if row.peak_bytes is None else f"{row.peak_bytes / MIB:,.1f}"
        speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        table.add_row(*map(str, row.choice.values()), row.outcome, peak, speed, "best" if row is best else "")
    return table


def pareto_front(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the measured configurations that no other beats in both memory and throughput, the leanest first."""
    front: list[TrialRow] = []
    for row in sorted(_measured(rows), key=lambda row: (row.peak_bytes or 0, -(row.tokens_per_second or 0))):
        if not front or (row.tokens_per_second or 0) > (front[-1].tokens_per_second or 0):
            front.append(row)
    return front


def over_time_figure(rows: Sequence[TrialRow]) -> bytes:
    """Return a PNG: the throughput of each trial, and the incumbent's."""
    figure = Figure(figsize=(9, 5), layout="constrained", dpi=120)
    axes = figure.subplots()
    ordered = sorted(rows, key=lambda row: row.number)
    incumbent: list[float | None] = []
    for row in ordered:
        best = incumbent[-1] if incumbent else None
        speed = row.tokens_per_second if row.fits else None
        incumbent.append(speed if best is None or (speed is not None and speed > best) else best)
    numbers = list(range(1, len(ordered) + 1))
    axes.step(
        numbers,
        [float("nan") if value is None else value for value in incumbent],
        where="post",
        color=colour(0),
        label="fastest so far that fits",
    )
    _scatter(axes, [(number, row) for number, row in zip(numbers, ordered, strict=True)])
    for number, row in zip(numbers, ordered, strict=True):
        if row.tokens_per_second is None:
            axes.axvline(number, color=colour(5), alpha=0.3, linestyle=":")
            axes.annotate(
                row.outcome.replace("_", " "),
                (number, 0.02),
                xycoords=("data", "axes fraction"),
                rotation=90,
                ha="right",
                fontsize="small",
            )
    axes.set(title="trials over time", xlabel="trial", ylabel="tokens per second", ylim=(0, None))
    axes.set_xticks(numbers if len(numbers) <= 30 else numbers[:: len(numbers) // 15])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
    return to_png(figure)


def plane_figure(rows: Sequence[TrialRow], budget_bytes: int, best: TrialRow | None) -> bytes:
    """Return a PNG: memory against throughput, with the budget and the Pareto front."""
    figure = Figure(figsize=(9, 6), layout="constrained", dpi=120)
    axes = figure.subplots()
    measured = _measured(rows)
    _scatter(axes, [((row.peak_bytes or 0) / MIB, row) for row in measured])
    front = pareto_front(rows)
    axes.step(
        [(row.peak_bytes or 0) / MIB for row in front],
        [row.tokens_per_second or 0 for row in front],
        where="post",
        color=colour(2),
        linestyle="--",
        label="Pareto front",
    )
    axes.axvline(budget_bytes / MIB, color=colour(5), label=f"budget {budget_bytes / MIB:,.0f} MiB")
    if best is not None:
        label = f"best: {in_words(best.choice)}"
        axes.annotate(
            label,
            ((best.peak_bytes or 0) / MIB, best.tokens_per_second or 0),
            textcoords="offset points",
            xytext=(0, 10),
            ha="left",
            fontsize="small",
        )
    right = max([budget_bytes / MIB, *((row.peak_bytes or 0) / MIB for row in measured)]) * 1.08
    axes.axvspan(budget_bytes / MIB, right, color=colour(5), alpha=0.08)
    axes.set(title="memory against throughput", xlabel="peak memory, MiB", ylabel="tokens per second", xlim=(0, right))
    axes.set_ylim(0, max((row.tokens_per_second or 0 for row in measured), default=1) * 1.12)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
    return to_png(figure)


def _measured(rows: Sequence[TrialRow]) -> list[TrialRow]:
    return [row for row in rows if row.tokens_per_second is not None and row.peak_bytes is not None]


def _scatter(axes: Any, points: Sequence[tuple[float, TrialRow]]) -> None:
    for fits, marker, index, label in ((True, "o", 0, "fits"), (False, "x", 5, "over the budget")):
        chosen = [
            (x, row.tokens_per_second) for x, row in points if row.fits is fits and row.tokens_per_second is not None
        ]
        if chosen:
            axes.scatter(*zip(*chosen, strict=True), marker=marker, color=colour(index), label=label, zorder=3)
