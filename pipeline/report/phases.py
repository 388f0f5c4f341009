"""The memory of one run at the end of each phase, beside its peak."""

from pipeline.report.plot import Bar, Plot, bars, colour
from pipeline.training.metrics import Row

PHASE_COLOURS = {
    "load": "#DDDDDD",
    "data": "#BBBBBB",
    "forward": colour(4),
    "backward": colour(1),
    "optimizer": colour(3),
    "evaluation": colour(5),
    "generation": colour(6),
    "saving": "#888888",
}


def phases_plot(row: Row, *, is_wide: bool = False) -> tuple[Plot, ...]:
    """Return a bar for each phase of the first two optimizer steps, and a line at the peak; none if not measured."""
    phases = {
        name.removeprefix("allocated_after_").removesuffix("_mib").replace("_", " "): value
        for name, value in row.metrics.items()
        if name.startswith("allocated_after_")
    }
    if not phases:
        return ()
    values = [
        Bar(name=f"after {phase}", value=mib, shade=PHASE_COLOURS.get(phase.split()[0], colour(7)))
        for phase, mib in phases.items()
    ]
    peak_mib = row.metrics.get("peak_allocated_mib")
    title = "memory at the end of each phase of the first two optimizer steps, and the peak"
    panel = bars(title, values, "MiB", marks={} if peak_mib is None else {"peak": peak_mib})
    return (panel.alone("phases", is_wide=is_wide),)
