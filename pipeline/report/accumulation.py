"""Accumulation: what a cut costs over an epoch, and how it smooths the loss."""

import math
import statistics
from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from pipeline.metrics import MOVING_AVERAGE_STEPS, Row, moving_average
from pipeline.report.overview import LINES, colour, over_steps, to_png


def tables(rows: Sequence[Row]) -> dict[str, pd.DataFrame]:
    """Return `epoch` (forward passes and updates, measured time beside its model) and `smoothness` (of the loss)."""
    timed = [row for row in rows if "seconds_per_step" in row.figures]
    if not timed:
        return {}
    return {"epoch": _epoch(timed), "smoothness": pd.DataFrame([_smoothness(row) for row in timed])}


def figures(rows: Sequence[Row]) -> dict[str, bytes]:
    """Return for each comparison a PNG of the smoothed loss and of the gradient norms with mean and deviation."""
    pictures = {}
    for comparison in dict.fromkeys(row.comparison for row in rows):
        shown = [row for row in rows if row.comparison == comparison and row.result and row.result.steps]
        if shown:
            pictures[f"smoothness_{comparison}"] = _smoothness_figure(comparison, shown)
    return pictures


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
                "s/step measured": row.figures["seconds_per_step"],
                "s/step modelled": _modelled_seconds(row, rows),
                "epoch, minutes": updates * row.figures["seconds_per_step"] / 60,
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
    line = statistics.linear_regression(passes, [other.figures["seconds_per_step"] for other in others])
    return float(line.slope * row.params["accumulation_steps"] + line.intercept)


def _smoothness(row: Row) -> dict[str, object]:
    losses = [record.loss for record in row.result.steps] if row.result else []
    noise = [abs(loss - smooth) for loss, smooth in zip(losses, moving_average(losses), strict=True)]
    return {
        "comparison": row.comparison,
        "variant": row.name,
        "loss std": row.figures["loss_std"],
        "loss cv": row.figures["loss_cv"],
        "mean distance from moving average": statistics.fmean(noise),
        "mean gradient norm": row.figures.get("mean_grad_norm"),
        "std gradient norm": row.figures.get("std_grad_norm"),
    }


def _smoothness_figure(comparison: str, rows: Sequence[Row]) -> bytes:
    figure = Figure(figsize=(12, 4.5), layout="constrained", dpi=120)
    losses, norms = figure.subplots(1, 2)
    for index, row in enumerate(rows):
        records = row.result.steps if row.result else ()
        steps, line = [record.step + 1 for record in records], LINES[index % len(LINES)]
        losses.plot(steps, [record.loss for record in records], color=colour(index), alpha=0.25)
        losses.plot(steps, moving_average([r.loss for r in records]), line, color=colour(index), label=row.name)
        norms.plot(steps, [record.grad_norm for record in records], line, color=colour(index), label=_norm_label(row))
    over_steps(losses, f"loss, mean of the last {MOVING_AVERAGE_STEPS} steps", "loss")
    over_steps(norms, "gradient norm before clipping (mean ± deviation)", "norm")
    norms.set_ylim(0, None)
    figure.suptitle(comparison.replace("_", " "))
    return to_png(figure)


def _norm_label(row: Row) -> str:
    if "mean_grad_norm" not in row.figures:
        return row.name
    return f"{row.name}: {row.figures['mean_grad_norm']:.2f} ± {row.figures['std_grad_norm']:.2f}"
