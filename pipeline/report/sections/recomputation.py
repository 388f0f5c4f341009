"""Recomputation: measured memory saving next to the theoretical one, and the number of recomputed layers."""

import math
from collections.abc import Sequence
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from pipeline.report.page import Section
from pipeline.report.plot import Plot, colour
from pipeline.report.table import Table
from pipeline.training.metrics import Row

NEEDED = {"memory_saving_percent", "time_overhead_percent", "block_forwards_per_step"}
"""Metrics that a run has where it and its baseline completed."""
MARKERS = ("o", "s", "^", "D")


def theory_percent(num_layers: float) -> float:
    """Return the theoretical saving of activations in percent, 1 - 1/sqrt(L) for L layers.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". The measured saving is that of the whole peak,
    parameters and logits included.
    """
    return 100 * (1 - 1 / math.sqrt(num_layers))


def section(rows: Sequence[Row]) -> Section:
    """Return the table and the plot `depth`: saving, overhead and block forwards of each variant that checkpoints."""
    frame = _depth(rows)
    if not len(frame):
        return Section(title="recomputation")
    panels = (
        partial(_savings, frame=frame),
        partial(_overheads, frame=frame),
        partial(_savings_against_overheads, frame=frame),
    )
    return Section(
        title="recomputation",
        tables=(Table(name="depth", title="saving and overhead by policy and depth", frame=frame),),
        plots=(Plot(name="depth", title="what recomputation saves and costs", panels=panels),),
    )


def _depth(rows: Sequence[Row]) -> pd.DataFrame:
    baselines = {row.comparison: row for row in rows if row.is_baseline}
    lines = []
    for row in rows:
        baseline = baselines.get(row.comparison)
        if row.is_baseline or baseline is None or not set(row.metrics) >= NEEDED:
            continue
        num_layers = baseline.metrics["block_forwards_per_step"] / baseline.params["accumulation_steps"]
        lines.append(
            {
                "comparison": row.comparison,
                "variant": row.name,
                "layers": int(num_layers),
                "saved %": row.metrics["memory_saving_percent"],
                "theory %": theory_percent(num_layers),
                "time %": row.metrics["time_overhead_percent"],
                "block forwards": int(row.metrics["block_forwards_per_step"]),
                "without checkpointing": int(baseline.metrics["block_forwards_per_step"]),
                "largest loss difference": row.metrics.get("max_loss_difference"),
            }
        )
    return pd.DataFrame(lines)


def _savings(axes: Axes, *, frame: pd.DataFrame) -> None:
    depths = range(1, int(frame["layers"].max()) + 3)
    axes.plot(depths, [theory_percent(n) for n in depths], ":", color=colour(7), label="1 - 1/sqrt(layers)")
    _points(axes, frame, "layers", "saved %")
    axes.set(title="memory saved", xlabel="layers", ylabel="% of the peak in live tensors", ylim=(0, 100))


def _overheads(axes: Axes, *, frame: pd.DataFrame) -> None:
    _points(axes, frame, "layers", "time %")
    axes.set(title="time overhead", xlabel="layers", ylabel="% of the time per step", ylim=(_floor(frame), None))


def _savings_against_overheads(axes: Axes, *, frame: pd.DataFrame) -> None:
    _points(axes, frame, "time %", "saved %")
    for number, (_, variant) in enumerate(frame.sort_values("time %").iterrows()):
        where, away = (
            (variant["time %"], variant["saved %"]),
            6 if number % 2 else -14,
        )  # neighbours alternate above and below
        label = str(variant["layers"])
        axes.annotate(label, where, textcoords="offset points", xytext=(0, away), ha="center", fontsize="x-small")
    axes.margins(x=0.2)
    axes.set(
        title="saving against overhead (numbers: layers)", xlabel="% of the time per step", ylabel="% of the peak saved"
    )
    axes.set_ylim(0, 100)
    axes.set_xlim(min(_floor(frame), axes.get_xlim()[0]), None)


def _points(axes: Axes, frame: pd.DataFrame, x: str, y: str) -> None:
    for index, (variant, lines) in enumerate(frame.groupby("variant", sort=False)):
        marker = MARKERS[index % len(MARKERS)]
        axes.scatter(lines[x], lines[y], label=str(variant), color=colour(index), marker=marker)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _floor(frame: pd.DataFrame) -> float:
    """Return the lower end of an axis of overheads: zero, or less where a variant became faster."""
    return min(0.0, float(frame["time %"].min()) * 1.2)
