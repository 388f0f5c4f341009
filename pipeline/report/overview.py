"""The charts of one comparison: the losses of each variant, or one run by phase and step."""

from collections.abc import Sequence

from pipeline.report.losses import losses_panel, seconds_panel
from pipeline.report.phases import phases_plot
from pipeline.report.plot import Plot
from pipeline.training.metrics import Row


def overview_plots(rows: Sequence[Row], of: str = "") -> tuple[Plot, ...]:
    """Return the losses of the comparison `of`; of a single run its memory by phase, and losses and times of steps."""
    name, losses = rows[0].comparison, losses_panel(rows, of)
    if len(rows) > 1:
        return (Plot(name=name, title=losses.title, panels=(losses,)),)
    over_time = Plot(name=name, title=f"steps of {rows[0].name}", panels=(losses, seconds_panel(rows)))
    return (*phases_plot(rows[0], is_wide=True), over_time)
