"""Checkpointing: measured saving beside the theoretical one, and the proof that layers were recomputed."""

import math
from collections.abc import Sequence

import pandas as pd

from pipeline.metrics import Row


def tables(rows: Sequence[Row]) -> dict[str, pd.DataFrame]:
    """Return `depth`: for each variant with checkpointing, saving, overhead and block forwards in one optimizer step.

    The theoretical saving is 1 - 1/sqrt(L) of the activations of L layers (Chen et al. 2016, "Training Deep Nets with
    Sublinear Memory Cost"); the measured one is of everything, parameters and logits included.
    """
    baselines = {row.comparison: row for row in rows if row.is_baseline}
    lines = []
    for row in rows:
        baseline = baselines.get(row.comparison)
        if row.is_baseline or baseline is None or "memory_saving_percent" not in row.figures:
            continue
        num_layers = baseline.figures["block_forwards_per_step"] / baseline.params["accumulation_steps"]
        lines.append(
            {
                "comparison": row.comparison,
                "variant": row.name,
                "layers": int(num_layers),
                "saved %": row.figures["memory_saving_percent"],
                "theory %": 100 * (1 - 1 / math.sqrt(num_layers)),
                "time %": row.figures["time_overhead_percent"],
                "block forwards": int(row.figures["block_forwards_per_step"]),
                "without checkpointing": int(baseline.figures["block_forwards_per_step"]),
                "largest loss difference": row.figures.get("max_loss_difference"),
            }
        )
    return {"depth": pd.DataFrame(lines)} if lines else {}
