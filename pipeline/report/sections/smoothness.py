"""Smoothness: how much the loss and the gradient norm vary from step to step."""

import statistics
from collections.abc import Sequence

import altair as alt

from pipeline.report.curves import curves
from pipeline.report.page import Section
from pipeline.report.plot import Panel, Plot
from pipeline.report.table import Table
from pipeline.training.metrics import Row, moving_average


def section(rows: Sequence[Row]) -> Section:
    """Return the table `smoothness`, and for each comparison a plot of gradient norms."""
    timed = [row for row in rows if "seconds_per_step" in row.metrics]
    tables = (Table.of("smoothness", "smoothness", map(_smoothness, timed)),) if timed else ()
    return Section(title="smoothness of the training", tables=tables, plots=_plots(rows))


def _plots(rows: Sequence[Row]) -> tuple[Plot, ...]:
    plots = []
    for comparison in dict.fromkeys(row.comparison for row in rows):
        shown = [row for row in rows if row.comparison == comparison]
        if any(row.steps for row in shown):
            plots.append(_gradient_norms(shown, comparison.replace("_", " ")).alone(f"smoothness_{comparison}"))
    return tuple(plots)


def _smoothness(row: Row) -> dict[str, object]:
    losses = [record.loss for record in row.steps]
    distances = [abs(loss - smooth) for loss, smooth in zip(losses, moving_average(losses), strict=True)]
    return {
        "comparison": row.comparison,
        "variant": row.name,
        "loss std": row.metrics["loss_std"],
        "loss cv": row.metrics.get("loss_cv"),
        "mean distance from moving average": statistics.fmean(distances),
        "mean gradient norm": row.metrics.get("mean_grad_norm"),
        "std gradient norm": row.metrics.get("std_grad_norm"),
    }


def _gradient_norms(rows: Sequence[Row], of: str) -> Panel:
    norms = {
        _norm_label(row): [(record.step + 1, record.grad_norm) for record in row.steps] for row in rows if row.steps
    }
    numbers = {_norm_label(row): number for number, row in enumerate(rows)}
    title = f"{of}: gradient norm before clipping (mean ± deviation)"
    return curves(title, norms, "norm", scale=alt.Scale(zero=True), colour_numbers=numbers)


def _norm_label(row: Row) -> str:
    if "mean_grad_norm" not in row.metrics:
        return row.name
    return f"{row.name}: {row.metrics['mean_grad_norm']:.2f} ± {row.metrics['std_grad_norm']:.2f}"
