"""The charts of one comparison: peak memory, time and losses of each variant, or one run by phase and step."""

import sys
from collections.abc import Mapping, Sequence

from pipeline.base.units import MIB, parse_budget
from pipeline.report.answers import outcome_of
from pipeline.report.losses import losses_panel, seconds_panel
from pipeline.report.phases import phases_plot
from pipeline.report.plot import Bar, Panel, Plot, bars, colour, short
from pipeline.training.metrics import Row
from pipeline.training.time_differences import MARGIN

PEAK = "peak_allocated_mib"
SEEN = 0.005
"""Share of the largest mean loss by which they differ, if bars are to show it."""
NEAR = 2.0
"""Multiple of the largest peak up to which a budget is drawn beside the peaks."""


def overview_plots(title: str, rows: Sequence[Row]) -> tuple[Plot, ...]:
    """Return peak memory, time and losses of one comparison; of a single run its memory by phase, and its losses."""
    name = rows[0].comparison
    if len(rows) == 1:
        over_time = Plot(name=name, title=title, panels=(losses_panel(rows), seconds_panel(rows)))
        return (*phases_plot(rows[0], is_wide=True), over_time)
    panels = (
        metric_bars(rows, PEAK, "peak memory in live tensors", "MiB", marks=_budget(rows)),
        metric_bars(
            rows,
            "seconds_per_step",
            "time per optimizer step, with its interval",
            "seconds",
            margin_percent=MARGIN,
        ),
        losses_panel(rows),
        *([metric_bars(rows, "mean_loss", "mean loss over all steps", "loss")] if _losses_differ(rows) else []),
    )
    return (Plot(name=name, title=title, panels=panels),)


def _losses_differ(rows: Sequence[Row]) -> bool:
    """Return whether bars of the mean losses, over equally many steps, would differ by what can be seen."""
    if len({row.params.get("num_steps") for row in rows}) > 1:
        return False
    losses = [row.metrics["mean_loss"] for row in rows if "mean_loss" in row.metrics]
    return bool(losses) and max(losses) - min(losses) > SEEN * max(losses)


def metric_bars(
    rows: Sequence[Row],
    name: str,
    title: str,
    unit: str,
    margin_percent: str | None = None,
    marks: Mapping[str, float] | None = None,
) -> Panel:
    """Return a bar for each variant that completed; of others the outcome, and the memory that they had reached."""
    values = []
    for number, row in enumerate(rows):
        value, text = row.metrics.get(name), None
        half = (value or 0.0) * row.metrics.get(margin_percent, 0.0) / 100 if margin_percent else 0.0
        if not row.completed:
            text = outcome_of(row).replace("_", " ")
            if name == PEAK and value is not None:
                text = f"{text} at {short(value)} {unit}"
            value, half = None, 0.0
        elif value is None:
            text = "not measured"
        values.append(Bar(name=row.name, value=value, shade=colour(number), text=text, spread=half))
    return bars(title, values, unit, marks)


def _budget(rows: Sequence[Row]) -> dict[str, float]:
    """Return the budget in MiB by its name, if all runs have one that limits allocated memory, and it is near."""
    budgets = {str(row.params.get("budget")) for row in rows}
    peaks = [row.metrics[PEAK] for row in rows if PEAK in row.metrics]
    if len(budgets) > 1 or not peaks or any("peak_reserved_mib" in row.metrics for row in rows):
        return {}
    [text] = budgets
    if text == str(None) or text.endswith("%"):
        return {}
    budget_mib = parse_budget(text, sys.maxsize) / MIB
    return {"budget": budget_mib} if budget_mib <= NEAR * max(peaks) else {}
