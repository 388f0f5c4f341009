"""Stability: how a number format changes losses, skipped steps and small gradients."""

from collections.abc import Mapping, Sequence

import altair as alt

from pipeline.base.results import StepRecord
from pipeline.report.curves import curves
from pipeline.report.losses import colour_numbers
from pipeline.report.page import Section
from pipeline.report.plot import Bar, Panel, Plot, bars, colour
from pipeline.report.table import Table
from pipeline.training.metrics import Row


def section(rows: Sequence[Row]) -> Section:
    """Return the table and the plot `stability`: loss differences, skipped steps, loss scale, gradient underflow."""
    return Section(title="stability of the training", tables=_tables(rows), plots=_plots(rows))


def _tables(rows: Sequence[Row]) -> tuple[Table, ...]:
    lines = []
    for row in rows:
        if not row.steps:
            continue
        lines.append(
            {
                "variant": row.name,
                "largest loss difference": row.metrics.get("max_loss_difference"),
                "final loss": row.metrics["final_loss"],
                "skipped steps": int(row.metrics["skipped_steps"]),
                "last loss scale": row.steps[-1].loss_scale,
                "gradient lost in unscaled fp16 %": row.metrics.get("gradient_underflow_percent"),
            }
        )
    forms = {"last loss scale": "{:,.0f}"}
    return (Table.of("stability", "stability", lines, forms=forms),) if lines else ()


def _plots(rows: Sequence[Row]) -> tuple[Plot, ...]:
    panels = []
    scaled = {row.name: row.steps for row in rows if row.steps and row.steps[0].loss_scale is not None}
    if scaled:
        panels.append(_scales(scaled, colour_numbers(rows)))
    if any("gradient_underflow_percent" in row.metrics for row in rows):
        panels.append(_underflow(rows))
    return (Plot(name="stability", title="stability of the training", panels=tuple(panels)),) if panels else ()


def _underflow(rows: Sequence[Row]) -> Panel:
    lost = {row.name: row.metrics.get("gradient_underflow_percent") for row in rows if row.completed}
    values = [
        Bar(name=name, value=percent, shade=colour(0), text="not measured" if percent is None else None)
        for name, percent in lost.items()
    ]
    return bars("gradient that fp16 would lose without loss scaling", values, "% of its non-zero elements")


def _scales(scaled: Mapping[str, Sequence[StepRecord]], numbers: Mapping[str, int]) -> Panel:
    scales = {name: [(record.step + 1, record.loss_scale) for record in steps] for name, steps in scaled.items()}
    skipped = {
        name: [(record.step + 1, record.loss_scale) for record in steps if record.skipped]
        for name, steps in scaled.items()
    }
    return curves(
        "loss scale (cross: a skipped step)",
        scales,
        "scale",
        scale=alt.Scale(type="log", base=2),
        crosses=skipped,
        colour_numbers=numbers,
    )
