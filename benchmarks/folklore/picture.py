"""What is claimed beside what was measured, as one picture: a panel for each unit, a line for each statement."""

import io
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from folklore.claim import number
from folklore.verdict import Statement
from pipeline.report.plot import COLOURS, DOTS_PER_INCH, WARNING

CLAIMED, HOLDS = "#cccccc", COLOURS[0]
LIMITS = {"%": (-60.0, 150.0)}
"""What of a unit's axis is shown; figures beyond it stand at its edge, with their value."""
LINE_INCHES, PANEL_INCHES, WIDTH_INCHES = 0.24, 0.75, 9.5


def plot(statements: Sequence[Statement]) -> bytes:
    """Return a PNG."""
    units = list(dict.fromkeys(statement.unit for statement in statements))
    panels = [[statement for statement in statements if statement.unit == unit] for unit in units]
    heights = [PANEL_INCHES + LINE_INCHES * len(panel) for panel in panels]
    figure = Figure((WIDTH_INCHES, sum(heights) + 0.4), DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for (one,), unit, panel in zip(axes, units, panels, strict=True):
        _draw(one, unit, panel)
    handles = [
        Patch(color=CLAIMED, label="claimed"),
        Line2D([], [], color=HOLDS, marker="o", label="measured, holds"),
        Line2D([], [], color=WARNING, marker="D", label="measured, does not"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw(axes: Axes, unit: str, statements: Sequence[Statement]) -> None:
    low, high = LIMITS.get(unit, _range(statements))
    axes.set(xlim=(low, high), ylim=(len(statements) - 0.4, -0.6), xlabel=unit)
    for place, statement in enumerate(statements):
        for finding in statement.findings:
            claimed = finding.check.claimed
            left, right = max(low, claimed.low), min(high, claimed.high)
            width = max(right - left, (high - low) / 150)
            axes.barh(place, width, left=left, height=0.7, color=CLAIMED, alpha=0.6, zorder=1)
            if not finding.samples:
                continue
            shade, marker = (HOLDS, "o") if finding.holds else (WARNING, "D")
            shown = min(max(finding.median, low), high)
            ends = [min(max(end, low), high) for end in (min(finding.samples), max(finding.samples))]
            axes.plot(ends, [place, place], color=shade, linewidth=1.5, zorder=2)
            axes.plot(shown, place, marker=marker, color=shade, markersize=4.5, zorder=3)
        _tell_what_is_beyond(axes, place, [finding.median for finding in statement.findings if finding.samples])
    labels = [f"{statement.claim.name}: {statement.what}" for statement in statements]
    axes.set_yticks(range(len(statements)), labels, fontsize="x-small")
    axes.tick_params(axis="x", labelsize="small")
    axes.grid(axis="x", alpha=0.3)


def _tell_what_is_beyond(axes: Axes, place: int, medians: Sequence[float]) -> None:
    """Write the least and the greatest figure of a line right of its end of the axis, where they are beyond it."""
    low, high = axes.get_xlim()
    for value, end in ((min(medians, default=low), low), (max(medians, default=high), high)):
        if not low <= value <= high:
            text = axes.annotate(number(value), (end, place), (6, 0), textcoords="offset points")
            text.set(va="center", fontsize="x-small")


def _range(statements: Sequence[Statement]) -> tuple[float, float]:
    """Return the ends of an axis that begins at zero and shows all."""
    claimed = [end for s in statements for f in s.findings for end in (f.check.claimed.high,) if math.isfinite(end)]
    measured = [sample for statement in statements for finding in statement.findings for sample in finding.samples]
    return 0.0, 1.1 * max([*claimed, *measured, 1.0])
