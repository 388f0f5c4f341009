"""Precision: how stable the training stays in each number format."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from pipeline.metrics import Row
from pipeline.report.overview import LINES, colour, over_steps, to_png


def tables(rows: Sequence[Row]) -> dict[str, pd.DataFrame]:
    """Return `stability`: distance from the baseline's loss, skipped steps, last loss scale, gradient underflow."""
    lines = []
    for row in rows:
        if row.result is None or not row.result.steps:
            continue
        lines.append(
            {
                "variant": row.name,
                "largest loss difference": row.figures.get("max_loss_difference"),
                "final loss": row.figures["final_loss"],
                "skipped steps": int(row.figures["skipped_steps"]),
                "last loss scale": row.result.steps[-1].loss_scale,
                "gradient lost in unscaled fp16 %": row.figures.get("gradient_underflow_percent"),
            }
        )
    return {"stability": pd.DataFrame(lines)} if lines else {}


def figures(rows: Sequence[Row]) -> dict[str, bytes]:
    """Return `stability`: a PNG of the distance from the baseline's loss, and of the loss scale with skipped steps."""
    records = {row.name: row.result.steps for row in rows if row.result is not None and row.result.steps}
    baseline = next((records[row.name] for row in rows if row.is_baseline and row.name in records), None)
    if baseline is None:
        return {}
    figure = Figure(figsize=(12, 4.5), layout="constrained", dpi=120)
    distances, scales = figure.subplots(1, 2)
    for index, row in enumerate(row for row in rows if row.name in records):
        steps = records[row.name]
        numbers, line = [record.step + 1 for record in steps], LINES[index % len(LINES)]
        if not row.is_baseline:
            away = np.array([abs(one.loss - other.loss) for one, other in zip(steps, baseline, strict=False)])
            distances.plot(numbers[: len(away)], away, line, color=colour(index), label=row.name)
        if steps[0].loss_scale is not None:
            scales.plot(numbers, [record.loss_scale or 0.0 for record in steps], color=colour(index), label=row.name)
            skipped = [record for record in steps if record.skipped]
            scales.scatter(
                [record.step + 1 for record in skipped],
                [record.loss_scale or 0.0 for record in skipped],
                marker="x",
                color=colour(5),
                label=f"skipped steps: {len(skipped)}",
                zorder=3,
            )
    over_steps(distances, "distance from the baseline's loss", "loss difference")
    if any((line.get_ydata() > 0).any() for line in distances.lines):
        distances.set_yscale("log")
    over_steps(scales, "loss scale", "scale")
    if scales.has_data():
        scales.set_yscale("log", base=2)
    return {"stability": to_png(figure)}
