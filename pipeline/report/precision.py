"""Precision: how stable the training stays in each number format."""

from collections.abc import Sequence

import pandas as pd

from pipeline.metrics import Row


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
