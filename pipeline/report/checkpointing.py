"""Checkpointing: measured saving beside the theoretical one, and the proof that layers were recomputed."""

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from pipeline.metrics import Row
from pipeline.report.overview import colour, to_png

NEEDED = {"memory_saving_percent", "time_overhead_percent", "block_forwards_per_step"}
"""Figures that a run has if it and its baseline were measured to the end."""
MARKERS = ("o", "s", "^", "D")


def theory_percent(num_layers: float) -> float:
    """Return the saving of activations in percent, 1 - 1/sqrt(L) for L layers.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". What is measured is the saving of everything,
    parameters and logits included.
    """
    return 100 * (1 - 1 / math.sqrt(num_layers))


def tables(rows: Sequence[Row]) -> dict[str, pd.DataFrame]:
    """Return `depth`: saving, overhead and block forwards in one optimizer step, of each variant that checkpoints."""
    baselines = {row.comparison: row for row in rows if row.is_baseline}
    lines = []
    for row in rows:
        baseline = baselines.get(row.comparison)
        if row.is_baseline or baseline is None or not set(row.figures) >= NEEDED:
            continue
        num_layers = baseline.figures["block_forwards_per_step"] / baseline.params["accumulation_steps"]
        lines.append(
            {
                "comparison": row.comparison,
                "variant": row.name,
                "layers": int(num_layers),
                "saved %": row.figures["memory_saving_percent"],
                "theory %": theory_percent(num_layers),
                "time %": row.figures["time_overhead_percent"],
                "block forwards": int(row.figures["block_forwards_per_step"]),
                "without checkpointing": int(baseline.figures["block_forwards_per_step"]),
                "largest loss difference": row.figures.get("max_loss_difference"),
            }
        )
    return {"depth": pd.DataFrame(lines)} if lines else {}


def figures(rows: Sequence[Row]) -> dict[str, bytes]:
    """Return `depth`: a PNG of saving and overhead against the number of layers, the theoretical saving as a curve."""
    frame = tables(rows).get("depth")
    if frame is None:
        return {}
    figure = Figure(figsize=(12, 4.5), layout="constrained", dpi=120)
    savings, overheads = figure.subplots(1, 2)
    depths = range(1, int(frame["layers"].max()) + 3)
    savings.plot(depths, [theory_percent(n) for n in depths], ":", color=colour(7), label="1 - 1/sqrt(layers)")
    for index, (variant, lines) in enumerate(frame.groupby("variant", sort=False)):
        for axes, column in ((savings, "saved %"), (overheads, "time %")):
            shape = {"color": colour(index), "marker": MARKERS[index % len(MARKERS)]}
            axes.scatter(lines["layers"], lines[column], label=str(variant), **shape)
    savings.set(title="memory saved", xlabel="layers", ylabel="% of the peak in live tensors", ylim=(0, 100))
    overheads.set(title="time overhead", xlabel="layers", ylabel="% of the time per step")
    for axes in (savings, overheads):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return {"depth": to_png(figure)}
