"""An epoch: forward passes, updates and minutes, with the measured time of a step next to a linear model of it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from pipeline.report.answers import readable
from pipeline.report.page import Section
from pipeline.report.table import Table
from pipeline.training.metrics import Row
from pipeline.training.time_differences import MARGIN

MODELLED = "s/step modelled"
FEWEST = 3
"""Numbers of forward passes that a line is tested on; through two there is always one."""


def section(rows: Sequence[Row]) -> Section:
    """Return the table `epoch` of all variants that were timed."""
    timed = [row for row in rows if "seconds_per_step" in row.metrics]
    if not timed:
        return Section(title="epoch")
    lines = _epoch(timed)
    without = dict.fromkeys(line["comparison"] for line in lines if line[MODELLED] is None)
    note = (
        f"No model of {', '.join(map(readable, without))}: the step times of the other variants do not lie on a line "
        "in the number of forward passes within their noise, or are too few."
        if without
        else None
    )
    return Section(title="epoch", tables=(Table.of("epoch", "epoch", lines, note=note),))


def _epoch(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a line for each variant, for an epoch of dataset_size sequences."""
    lines = []
    for row in rows:
        size = row.params["effective_batch_size"]
        updates = math.ceil(row.params["dataset_size"] / size)
        lines.append(
            {
                "comparison": row.comparison,
                "variant": row.name,
                "effective batch": size,
                "forward passes": math.ceil(row.params["dataset_size"] / row.params["micro_batch_size"]),
                "updates": updates,
                "s/step measured": row.metrics["seconds_per_step"],
                "± %": row.metrics.get(MARGIN),
                MODELLED: _modelled_seconds(row, rows),
                "epoch, minutes": updates * row.metrics["seconds_per_step"] / 60,
            }
        )
    return lines


def _modelled_seconds(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the seconds of an optimizer step, predicted from the other variants of the comparison.

    A line in the number of forward passes is fitted to them: at a fixed micro-batch size its intercept is the time of
    the update, at a fixed effective batch size that of the update and of the arithmetic, which accumulation leaves as
    it is. Neither that nor the time of a pass is negative. The row itself is left out, so its measured time tests the
    line. None if the line misses one of the others by more than its noise.
    """
    others = [other for other in rows if other.comparison == row.comparison and other is not row]
    passes = [float(other.params["accumulation_steps"]) for other in others]
    seconds = [other.metrics["seconds_per_step"] for other in others]
    if len(set(passes)) < FEWEST:
        return None
    errors = [time * other.metrics.get(MARGIN, 0.0) / 100 for time, other in zip(seconds, others, strict=True)]
    columns = np.column_stack([passes, np.ones(len(passes))]) / np.array(seconds)[:, None]
    (slope, intercept), _ = nnls(columns, np.ones(len(passes)))  # least squares of relative errors
    fitted = [slope * number + intercept for number in passes]
    if any(abs(one - time) > error for one, time, error in zip(fitted, seconds, errors, strict=True)):
        return None
    return float(slope * row.params["accumulation_steps"] + intercept)
