"""The charts of one comparison: the losses of each variant, or one run by phase and step."""

from collections.abc import Sequence

from pipeline.report.answers import outcome_of
from pipeline.report.losses import losses_panel, seconds_panel
from pipeline.report.phases import phases_plot
from pipeline.report.plot import Bar, Panel, Plot, bars, colour, short
from pipeline.training.metrics import Row
from pipeline.training.time_differences import MARGIN, is_compared

PEAK = "peak_allocated_mib"
SEEN = 0.005
"""Share of the largest mean loss by which they differ, if bars are to show it."""


def overview_plots(title: str, rows: Sequence[Row]) -> tuple[Plot, ...]:
    """Return the losses of one comparison, and memory and time if no variant compares with the baseline.

    Of a single run they are memory by phase, and the losses and times of its steps.
    """
    name = rows[0].comparison
    if len(rows) == 1:
        over_time = Plot(name=name, title=title, panels=(losses_panel(rows), seconds_panel(rows)))
        return (*phases_plot(rows[0], is_wide=True), over_time)
    panels = (
        *([] if any(map(is_compared, rows)) else _costs(rows)),
        losses_panel(rows),
        *([metric_bars(rows, "mean_loss", "mean loss over all steps", "loss")] if _losses_differ(rows) else []),
    )
    return (Plot(name=name, title=title, panels=panels),)


def _costs(rows: Sequence[Row]) -> list[Panel]:
    time = "time per optimizer step, with its interval"
    return [
        metric_bars(rows, PEAK, "peak memory in live tensors", "MiB"),
        metric_bars(rows, "seconds_per_step", time, "seconds", margin_percent=MARGIN),
    ]


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
    return bars(title, values, unit)
