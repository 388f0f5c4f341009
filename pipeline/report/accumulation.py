"""Accumulation: what a cut costs over an epoch, and how it smooths the loss."""

import math
import statistics
from collections.abc import Sequence
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from pipeline.report.plot import Plot, colour, line, over_steps
from pipeline.report.table import Table
from pipeline.training.metrics import MOVING_AVERAGE_STEPS, Row, moving_average


def tables(rows: Sequence[Row]) -> tuple[Table, ...]:
    """Return `epoch` (forward passes and updates, measured time beside its model) and `smoothness` (of the loss)."""
    timed = [row for row in rows if "seconds_per_step" in row.metrics]
    if not timed:
        return ()
    smoothness = pd.DataFrame([_smoothness(row) for row in timed])
    return (
        Table(name="epoch", title="epoch", frame=_epoch(timed)),
        Table(name="smoothness", title="smoothness", frame=smoothness),
    )


def plots(rows: Sequence[Row]) -> tuple[Plot, ...]:
    """Return for each comparison the smoothed loss and the gradient norms with mean and deviation."""
    found = []
    for comparison in dict.fromkeys(row.comparison for row in rows):
        shown = [row for row in rows if row.comparison == comparison]
        if any(row.result and row.result.steps for row in shown):
            panels = (partial(_smoothed_losses, rows=shown), partial(_gradient_norms, rows=shown))
            title = f"smoothness: {comparison.replace('_', ' ')}"
            found.append(Plot(name=f"smoothness_{comparison}", title=title, panels=panels))
    return tuple(found)


def _epoch(rows: Sequence[Row]) -> pd.DataFrame:
    """Return counts and minutes of an epoch of dataset_size sequences."""
    lines = []
    for row in rows:
        micro, steps = row.params["micro_batch_size"], row.params["accumulation_steps"]
        updates = math.ceil(row.params["dataset_size"] / (micro * steps))
        lines.append(
            {
                "comparison": row.comparison,
                "variant": row.name,
                "effective batch": micro * steps,
                "forward passes": math.ceil(row.params["dataset_size"] / micro),
                "updates": updates,
                "s/step measured": row.metrics["seconds_per_step"],
                "s/step modelled": _modelled_seconds(row, rows),
                "epoch, minutes": updates * row.metrics["seconds_per_step"] / 60,
            }
        )
    return pd.DataFrame(lines)


def _modelled_seconds(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the time that the other variants of the comparison predict for this one.

    An optimizer step takes forward passes x a + b: at one micro-batch size b is the update, at one effective batch size
    the update and the arithmetic that no cut changes. The line is fitted to the others alone, so it can be wrong.
    """
    others = [other for other in rows if other.comparison == row.comparison and other is not row]
    passes = [other.params["accumulation_steps"] for other in others]
    if len(set(passes)) < 2:
        return None
    fitted = statistics.linear_regression(passes, [other.metrics["seconds_per_step"] for other in others])
    return float(fitted.slope * row.params["accumulation_steps"] + fitted.intercept)


def _smoothness(row: Row) -> dict[str, object]:
    losses = [record.loss for record in row.result.steps] if row.result else []
    noise = [abs(loss - smooth) for loss, smooth in zip(losses, moving_average(losses), strict=True)]
    return {
        "comparison": row.comparison,
        "variant": row.name,
        "loss std": row.metrics["loss_std"],
        "loss cv": row.metrics["loss_cv"],
        "mean distance from moving average": statistics.fmean(noise),
        "mean gradient norm": row.metrics.get("mean_grad_norm"),
        "std gradient norm": row.metrics.get("std_grad_norm"),
    }


def _smoothed_losses(axes: Axes, *, rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        records = row.result.steps if row.result else ()
        if not records:
            continue
        steps, losses = [record.step + 1 for record in records], [record.loss for record in records]
        axes.plot(steps, losses, color=colour(index), alpha=0.25)
        axes.plot(steps, moving_average(losses), line(index), color=colour(index), label=row.name)
    over_steps(axes, f"loss, mean of the last {MOVING_AVERAGE_STEPS} steps", "loss")


def _gradient_norms(axes: Axes, *, rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        records = row.result.steps if row.result else ()
        if not records:
            continue
        steps, norms = [record.step + 1 for record in records], [record.grad_norm for record in records]
        axes.plot(steps, norms, line(index), color=colour(index), label=_norm_label(row))
    over_steps(axes, "gradient norm before clipping (mean ± deviation)", "norm")
    axes.set_ylim(0, None)


def _norm_label(row: Row) -> str:
    if "mean_grad_norm" not in row.metrics:
        return row.name
    return f"{row.name}: {row.metrics['mean_grad_norm']:.2f} ± {row.metrics['std_grad_norm']:.2f}"
