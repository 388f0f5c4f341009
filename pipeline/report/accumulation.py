"""Accumulation: what a cut costs over an epoch, and how it smooths the loss."""

import math
from collections.abc import Sequence

import pandas as pd

from pipeline.metrics import Row, moving_average


def tables(rows: Sequence[Row]) -> dict[str, pd.DataFrame]:
    """Return `epoch` (forward passes and updates, measured time beside its model) and `smoothness` (of the loss)."""
    measured = [row for row in rows if row.result is not None and "seconds_per_step" in row.figures]
    if not measured:
        return {}
    return {"epoch": _epoch(measured), "smoothness": _smoothness(measured)}


def _epoch(rows: Sequence[Row]) -> pd.DataFrame:
    """Return counts and hours of an epoch.

    The model of the time is forward passes x seconds a pass + updates x seconds an update, its two constants fitted by
    least squares over the cuts of the same micro-batch size, where there are at least two.
    """
    lines = []
    for row in rows:
        micro, steps = row.params["micro_batch_size"], row.params["accumulation_steps"]
        passes = math.ceil(row.params["dataset_size"] / micro)
        updates = math.ceil(row.params["dataset_size"] / (micro * steps))
        modelled = _modelled_seconds(row, rows)
        lines.append(
            {
                "comparison": row.comparison,
                "variant": row.name,
                "effective batch": micro * steps,
                "forward passes": passes,
                "updates": updates,
                "s/step measured": row.figures["seconds_per_step"],
                "s/step modelled": modelled,
                "epoch, minutes": updates * row.figures["seconds_per_step"] / 60,
            }
        )
    return pd.DataFrame(lines)


def _modelled_seconds(row: Row, rows: Sequence[Row]) -> float | None:
    """Return accumulation_steps x pass + update, fitted to the other variants of the same micro-batch size alone."""
    micro = row.params["micro_batch_size"]
    points = [
        (other.params["accumulation_steps"], other.figures["seconds_per_step"])
        for other in rows
        if other.params["micro_batch_size"] == micro and other is not row
    ]
    if len({steps for steps, _ in points}) < 2:
        return None
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    modelled: float = mean_y + slope * (row.params["accumulation_steps"] - mean_x)
    return modelled


def _smoothness(rows: Sequence[Row]) -> pd.DataFrame:
    lines = []
    for row in rows:
        assert row.result is not None
        losses = [record.loss for record in row.result.steps]
        noise = [abs(loss - smooth) for loss, smooth in zip(losses, moving_average(losses), strict=True)]
        lines.append(
            {
                "comparison": row.comparison,
                "variant": row.name,
                "loss std": row.figures["loss_std"],
                "loss cv": row.figures["loss_cv"],
                "mean distance from moving average": sum(noise) / len(noise),
                "mean gradient norm": row.figures.get("mean_grad_norm"),
                "std gradient norm": row.figures.get("std_grad_norm"),
            }
        )
    return pd.DataFrame(lines)
