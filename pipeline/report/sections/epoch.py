"""An epoch: forward passes, updates and minutes, with the measured time of a step next to a linear model of it."""

import math
import statistics
from collections.abc import Sequence

import pandas as pd

from pipeline.report.page import Section
from pipeline.report.table import Table
from pipeline.training.metrics import Row


def section(rows: Sequence[Row]) -> Section:
    """Return the table `epoch` of all variants that were timed."""
    timed = [row for row in rows if "seconds_per_step" in row.metrics]
    tables = (Table(name="epoch", title="epoch", frame=_epoch(timed)),) if timed else ()
    return Section(title="epoch", tables=tables)


def _epoch(rows: Sequence[Row]) -> pd.DataFrame:
    """Return a row for each variant, for an epoch of dataset_size sequences."""
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
                "s/step modelled": _modelled_seconds(row, rows),
                "epoch, minutes": updates * row.metrics["seconds_per_step"] / 60,
            }
        )
    return pd.DataFrame(lines)


def _modelled_seconds(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the seconds of an optimizer step, predicted from the other variants of the comparison.

    A line in the number of forward passes is fitted to them: at a fixed micro-batch size its intercept is the time of
    the update, at a fixed effective batch size that of the update and of the arithmetic, which accumulation leaves as
    it is. The row itself is left out, so its measured time tests the line.
    """
    others = [other for other in rows if other.comparison == row.comparison and other is not row]
    passes = [other.params["accumulation_steps"] for other in others]
    if len(set(passes)) < 2:
        return None
    fitted = statistics.linear_regression(passes, [other.metrics["seconds_per_step"] for other in others])
    return float(fitted.slope * row.params["accumulation_steps"] + fitted.intercept)
