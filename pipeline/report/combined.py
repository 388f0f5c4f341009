"""Combined: what each technique adds on the way from the baseline to all of them."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes

from pipeline.report.plot import WARNING, Plot, colour, short
from pipeline.report.table import Table
from pipeline.training.metrics import Row

NEEDED = {"peak_allocated_mib", "seconds_per_step"}
LADDER = ("precision", "micro_batch_size", "checkpointing")
"""The settings that the ladder changes, one more on each rung."""


def tables(rows: Sequence[Row]) -> tuple[Table, ...]:
    """Return none: the comparison's own table says it all."""
    del rows
    return ()


def plots(rows: Sequence[Row]) -> tuple[Plot, ...]:
    """Return `waterfall`: memory and time down the ladder, rung by rung."""
    rungs = _rungs(rows)
    if len(rungs) < 2:
        return ()
    panels = (
        partial(_waterfall, rungs=rungs, name="peak_allocated_mib", title="peak memory down the ladder", unit="MiB"),
        partial(_waterfall, rungs=rungs, name="seconds_per_step", title="time down the ladder", unit="s/step"),
    )
    return (Plot(name="waterfall", title="what each technique adds", panels=panels),)


def _rungs(rows: Sequence[Row]) -> list[Row]:
    """Return the baseline, then variants that each change all that the one before does, and one setting more."""
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
