"""Plots of a search: trials over time, memory against throughput, and parallel coordinates."""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes

from pipeline.base.units import MIB
from pipeline.report.plot import WARNING, Plot, colour
from pipeline.searching.results import FEW_DIMENSIONS, Trial, columns, measured, pareto_front, speed_of


def over_time_plot(rows: Sequence[Trial]) -> Plot:
    """Return the throughput of each trial and of the best one so far."""
    ordered = sorted(rows, key=lambda row: row.number)
    return Plot(name="trials_over_time", title="trials over time", panels=(partial(_over_time, rows=ordered),))


def plane_plot(rows: Sequence[Trial], budget_bytes: int, best: Trial | None) -> Plot:
    """Return memory against throughput, with the budget and the Pareto front."""
    panel = partial(_plane, rows=rows, budget_mib=budget_bytes / MIB, best=best)
    return Plot(name="memory_against_throughput", title="memory against throughput", panels=(panel,))


def parallel_plot(rows: Sequence[Trial], budget_bytes: int, best: Trial | None) -> Plot:
    """Return parallel coordinates: a line for each trial through its values, its memory and its throughput."""
    panel = partial(_parallel, rows=rows, budget_mib=budget_bytes / MIB, best=best)
    return Plot(name="parallel_coordinates", title="trials by dimension", panels=(panel,))


def _over_time(axes: Axes, *, rows: Sequence[Trial]) -> None:
    speeds = [(row.tokens_per_second or 0.0) if row.fits else 0.0 for row in rows]
    incumbent = [best if best else math.nan for best in itertools.accumulate(speeds, max)]
    numbers = list(range(1, len(rows) + 1))
    axes.step(numbers, incumbent, where="post", color=colour(0), label="fastest so far that fits")
    _scatter(axes, list(zip(numbers, rows, strict=True)))
    for number, row in zip(numbers, rows, strict=True):
        if row.tokens_per_second is None:
            axes.axvline(number, color=WARNING, alpha=0.3, linestyle=":")
            ends = axes.get_xaxis_transform()
            axes.text(number, 0.02, row.outcome.replace("_", " "), transform=ends, rotation=90, ha="right", fontsize=8)
    axes.set(title="trials over time", xlabel="trial", ylabel="tokens per second", ylim=(0, None))
    axes.set_xticks(numbers if len(numbers) <= 20 else numbers[:: len(numbers) // 10])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)


def _plane(axes: Axes, *, rows: Sequence[Trial], budget_mib: float, best: Trial | None) -> None:
    ended, front = measured(rows), pareto_front(rows)
    _scatter(axes, [(_mib(row), row) for row in ended])
    axes.step(
        [_mib(row) for row in front],
        [speed_of(row.choice, rows) for row in front],
        where="post",
        color=colour(2),
        linestyle="--",
        label="Pareto front",
    )
    right = max([budget_mib, *map(_mib, ended)]) * 1.08
    axes.axvline(budget_mib, color=WARNING, label=f"budget {budget_mib:,.0f} MiB")
    axes.axvspan(budget_mib, right, color=WARNING, alpha=0.08, label="over the budget")
    if best is not None and best.tokens_per_second:
        where = (_mib(best), best.tokens_per_second)
        axes.scatter(*where, s=160, facecolors="none", edgecolors=colour(2), linewidths=2, zorder=4, label="best")
    axes.set(title="memory against throughput", xlabel="peak memory, MiB", ylabel="tokens per second", xlim=(0, right))
    axes.set_ylim(0, max((row.tokens_per_second or 0 for row in ended), default=1) * 1.12)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")


def _parallel(axes: Axes, *, rows: Sequence[Trial], budget_mib: float, best: Trial | None) -> None:
    ended = measured(rows)
    shown = columns(row.choice for row in rows)
    names = list(shown)
    peak = max([budget_mib, *map(_mib, ended)])
    speed = max((row.tokens_per_second or 0 for row in ended), default=1.0)
    values = {name: sorted({row.choice[name] for row in rows}, key=_order) for name in names}
    for row in sorted(ended, key=lambda row: row is best):
        heights = [_height(values[name], row.choice[name]) for name in names]
        shade = colour(2) if row is best else colour(0) if row.fits else WARNING
        width = 2.5 if row is best else 1.0
        axes.plot([*heights, _mib(row) / peak, (row.tokens_per_second or 0) / speed], color=shade, lw=width, alpha=0.7)
    for place, name in enumerate(names):
        _scale(axes, place, {str(value): _height(values[name], value) for value in values[name]})
    _scale(axes, len(names), {"0": 0.0, f"{peak:,.0f}": 1.0})
    _scale(axes, len(names) + 1, {"0": 0.0, f"{speed:,.0f}": 1.0})
    axes.plot([len(names) - 0.1, len(names) + 0.1], [budget_mib / peak] * 2, color=WARNING, lw=3)
    headings = [
        text.replace(".", ".\n").replace("_", "_\n" if len(names) > FEW_DIMENSIONS else "_") for text in shown.values()
    ]
    axes.set_xticks(range(len(names) + 2), [*headings, "peak MiB", "tokens/s"], fontsize="small")
    axes.set(title="green: best, red: over the budget", yticks=[], ylim=(-0.05, 1.08), xlim=(-0.1, len(names) + 1.5))
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _scale(axes: Axes, place: int, labels: Mapping[str, float]) -> None:
    """Draw one vertical axis with its values."""
    axes.axvline(place, color="grey", lw=0.8)
    for text, height in labels.items():
        box = {"facecolor": "white", "alpha": 0.7, "pad": 1, "lw": 0}
        axes.text(place + 0.04, height, text, fontsize="x-small", va="center", bbox=box)


def _order(value: object) -> tuple[bool, float, str]:
    """Return a sort key: numbers in their order, then names."""
    is_number = isinstance(value, int | float)
    return (not is_number, float(value) if isinstance(value, int | float) else 0.0, str(value))


def _height(values: Sequence[object], value: object) -> float:
    return values.index(value) / (len(values) - 1) if len(values) > 1 else 0.5


def _mib(row: Trial) -> float:
    return (row.peak_bytes or 0) / MIB


def _scatter(axes: Axes, points: Sequence[tuple[float, Trial]]) -> None:
    for fits, marker, shade, label in ((True, "o", colour(0), "fits"), (False, "x", WARNING, "does not fit")):
        chosen = [(x, row.tokens_per_second) for x, row in points if row.fits is fits and row.tokens_per_second]
        if chosen:
            axes.scatter(*zip(*chosen, strict=True), marker=marker, color=shade, label=label, zorder=3)
