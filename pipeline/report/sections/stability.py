"""Stability: how a number format changes losses, skipped steps and small gradients."""

from collections.abc import Sequence
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from pipeline.report.comparison import bars
from pipeline.report.page import Section
from pipeline.report.plot import WARNING, Plot, colour, line, over_steps
from pipeline.report.table import Table
from pipeline.training.metrics import Row


def section(rows: Sequence[Row]) -> Section:
    """Return the table and the plot `stability`: loss differences, skipped steps, loss scale, gradient underflow."""
    return Section(title="stability of the training", tables=_tables(rows), plots=_plots(rows))


def _tables(rows: Sequence[Row]) -> tuple[Table, ...]:
    lines = []
    for row in rows:
        if row.result is None or not row.result.steps:
            continue
        lines.append(
            {
                "variant": row.name,
                "largest loss difference": row.metrics.get("max_loss_difference"),
                "final loss": row.metrics["final_loss"],
                "skipped steps": int(row.metrics["skipped_steps"]),
                "last loss scale": row.result.steps[-1].loss_scale,
                "gradient lost in unscaled fp16 %": row.metrics.get("gradient_underflow_percent"),
            }
        )
    forms = {"last loss scale": "{:,.0f}"}
    return (Table(name="stability", title="stability", frame=pd.DataFrame(lines), forms=forms),) if lines else ()


def _plots(rows: Sequence[Row]) -> tuple[Plot, ...]:
    if not any(row.is_baseline and row.result and row.result.steps for row in rows):
        return ()
    panels = [partial(_distances, rows=rows)]
    if any(_loss_scales(row) for row in rows):
        panels.append(partial(_scales, rows=rows))
    if any("gradient_underflow_percent" in row.metrics for row in rows):
        panels.append(
            partial(
                bars,
                rows=rows,
                name="gradient_underflow_percent",
                title="gradient that fp16 would lose without loss scaling",
                unit="% of its non-zero elements",
            )
        )
    return (Plot(name="stability", title="stability of the training", panels=tuple(panels)),)


def _distances(axes: Axes, *, rows: Sequence[Row]) -> None:
    baseline = next(row.result.steps for row in rows if row.is_baseline and row.result)
    drawn = False
    for index, row in enumerate(rows):
        if row.is_baseline or row.result is None:
            continue
        pairs = list(zip(row.result.steps, baseline, strict=False))
        away = [abs(one.loss - other.loss) for one, other in pairs]
        axes.plot([one.step + 1 for one, _ in pairs], away, line(index), color=colour(index), label=row.name)
        drawn = drawn or any(distance > 0 for distance in away)
    over_steps(axes, "distance from the baseline's loss", "loss difference")
    if drawn:
        axes.set_yscale("log")


def _scales(axes: Axes, *, rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        scales = _loss_scales(row)
        if row.result is None or not scales:
            continue
        axes.plot([record.step + 1 for record in row.result.steps], scales, color=colour(index), label=row.name)
        skipped = [(r.step + 1, scale) for r, scale in zip(row.result.steps, scales, strict=True) if r.skipped]
        if skipped:
            label = f"{row.name}: {len(skipped)} skipped steps"
            axes.scatter(*zip(*skipped, strict=True), marker="x", color=WARNING, label=label, zorder=3)
    over_steps(axes, "loss scale (x: a skipped step)", "scale")
    axes.set_yscale("log", base=2)


def _loss_scales(row: Row) -> list[float]:
    steps = row.result.steps if row.result else ()
    return [record.loss_scale for record in steps if record.loss_scale is not None]
