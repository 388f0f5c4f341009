"""Configurations whose memory is predicted: in the order in which they are expected to be fast, and which fit."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm

from pipeline.base.units import MIB
from pipeline.prediction.plan import PlannedRow
from pipeline.report.plot import Plot
from pipeline.searching.results import label


def fit_plot(name: str, title: str, rows: Sequence[PlannedRow], budget_bytes: int) -> Plot:
    """Return a heat map for each combination of the dimensions beside micro-batch and checkpointing."""
    groups: dict[tuple[tuple[str, Any], ...], list[PlannedRow]] = {}
    for row in rows:
        axes = ("micro_batch_size", "checkpointing")
        others = tuple((key, value) for key, value in row.choice.items() if key not in axes)
        groups.setdefault(others, []).append(row)
    panels = tuple(
        partial(_heat_map, rows=group, budget_bytes=budget_bytes, title=label(dict(others)) or "peak memory")
        for others, group in groups.items()
    )
    return Plot(name=name, title=title, panels=panels)


def _heat_map(axes: Axes, *, rows: Sequence[PlannedRow], budget_bytes: int, title: str) -> None:
    """Draw each configuration's share of the budget: blue fits, red does not, and the boundary between them."""
    sizes = sorted({row.micro_batch_size for row in rows})
    policies = list(dict.fromkeys(str(row.choice.get("checkpointing", "")) for row in rows))
    shares, fits = np.full((2, len(policies), len(sizes)), np.nan)
    for row in rows:
        place = policies.index(str(row.choice.get("checkpointing", ""))), sizes.index(row.micro_batch_size)
        shares[place], fits[place] = 100 * row.peak_bytes / budget_bytes, row.fits
        text = f"{row.peak_bytes / 2**30:.1f}" if budget_bytes >= 2**31 else f"{row.peak_bytes / MIB:,.0f}"
        axes.text(place[1], place[0], text, ha="center", va="center", fontsize="x-small")
    axes.imshow(np.clip(shares, 0, 200), cmap="RdBu_r", norm=TwoSlopeNorm(100, 0, 200), alpha=0.7, aspect="auto")
    for y, x in np.argwhere(fits == 1):
        if x + 1 < len(sizes) and fits[y, x + 1] == 0:
            axes.plot([x + 0.5, x + 0.5], [y - 0.5, y + 0.5], color="black", lw=2.5)
        for other in (y - 1, y + 1):
            if 0 <= other < len(policies) and fits[other, x] == 0:
                axes.plot([x - 0.5, x + 0.5], [(y + other) / 2] * 2, color="black", lw=2.5)
    unit = "GiB" if budget_bytes >= 2**31 else "MiB"
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_yticks(range(len(policies)), policies, fontsize="small")
    axes.set(title=f"{title}: predicted peak, {unit}", xlabel="micro-batch (black: the budget's boundary)")
