"""Waterfall: the change of memory and time by each technique, from the baseline to all of them."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes

from pipeline.report.page import Section
from pipeline.report.plot import WARNING, Plot, colour, short
from pipeline.training.metrics import Row

NEEDED = {"peak_allocated_mib", "seconds_per_step"}
LADDER = ("precision", "micro_batch_size", "checkpointing")
"""The settings that are changed, one more in each step of the waterfall."""


def section(rows: Sequence[Row]) -> Section:
    """Return the plot `waterfall`: memory and time of the baseline, changed by one technique after another."""
    rungs = _rungs(rows)
    if len(rungs) < 2:
        return Section(title="contributions")
    panels = (
        partial(_waterfall, rungs=rungs, name="peak_allocated_mib", title="peak memory", unit="MiB"),
        partial(_waterfall, rungs=rungs, name="seconds_per_step", title="time per optimizer step", unit="s/step"),
    )
    plot = Plot(name="waterfall", title="what each technique adds", panels=panels)
    return Section(title="contributions", plots=(plot,))


def _rungs(rows: Sequence[Row]) -> list[Row]:
    """Return the baseline, then variants that each change the settings of the one before and at least one more."""
    rungs = [row for row in rows if row.is_baseline and set(row.metrics) >= NEEDED][:1]
    for row in rows if rungs else ():
        before = _changes(rungs[-1], rungs[0])
        if set(row.metrics) >= NEEDED and before < _changes(row, rungs[0]):
            rungs.append(row)
    return rungs


def _changes(row: Row, baseline: Row) -> set[str]:
    return {name for name in LADDER if row.params[name] != baseline.params[name]}


def _waterfall(axes: Axes, *, rungs: Sequence[Row], name: str, title: str, unit: str) -> None:
    """Draw the first and the last value as bars, and the changes between them as steps."""
    values = [row.metrics[name] for row in rungs]
    labels = [rungs[0].name]
    axes.bar(0, values[0], color=colour(0))
    for number in range(1, len(rungs)):
        before, after = values[number - 1 : number + 1]
        added = _changes(rungs[number], rungs[0]) - _changes(rungs[number - 1], rungs[0])
        labels.append("\n".join(f"+ {setting}\n{rungs[number].params[setting]}" for setting in sorted(added)))
        axes.bar(number, after - before, bottom=before, color=colour(2) if after <= before else WARNING)
        axes.plot([number - 1.4, number + 0.4], [before, before], color="grey", linewidth=0.8)
        axes.annotate(
            f"{100 * (after / before - 1):+.0f} %", (number, max(before, after)), ha="center", va="bottom", fontsize=9
        )
    axes.bar(len(rungs), values[-1], color=colour(0))
    axes.annotate(short(values[0]), (0, values[0]), ha="center", va="bottom", fontsize=9)
    axes.annotate(short(values[-1]), (len(rungs), values[-1]), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(rungs) + 1), [*labels, rungs[-1].name], fontsize="x-small")
    axes.set(title=title, ylabel=unit, ylim=(0, max(values) * 1.12))
    axes.grid(axis="y", alpha=0.3)
