"""A plot of one or more panels: as one PNG, or each panel as its own PNG for narrow screens."""

import io
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib

matplotlib.use("agg")  # draws without a screen
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""Okabe and Ito's palette for colour-blind readers (jfly.uni-koeln.de/color)."""
WARNING = COLOURS[5]
"""The colour of configurations that do not fit and of failed runs."""
LINES = ("-", "--", "-.", ":")

PANEL_INCHES = (5.6, 4.0)
DOTS_PER_INCH = 140
LABEL_CHARACTERS = 28

Panel = Callable[[Axes], None]
"""Draws on empty axes, with a title."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Panels under one title."""

    name: str
    """File name without suffix."""
    title: str
    panels: tuple[Panel, ...]

    def to_png(self) -> bytes:
        """Return one PNG of all panels, in two columns."""
        columns = min(2, len(self.panels))
        rows = -(-len(self.panels) // columns)
        figure = Figure((PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.4), DOTS_PER_INCH, layout="constrained")
        for number, panel in enumerate(self.panels, 1):
            panel(figure.add_subplot(rows, columns, number))
        if any(axes.get_title() != self.title for axes in figure.axes):
            figure.suptitle(self.title)
        return _png(figure)

    def to_panel_pngs(self) -> list[bytes]:
        """Return one PNG for each panel."""
        images = []
        for panel in self.panels:
            figure = Figure(PANEL_INCHES, DOTS_PER_INCH, layout="constrained")
            panel(figure.add_subplot())
            images.append(_png(figure))
        return images


def bars_of(axes: Axes, *, values: Mapping[str, float], title: str, unit: str, shades: Sequence[str] = COLOURS) -> None:
    """Draw a horizontal bar for each name, with its value."""
    for index, (value, shade) in enumerate(zip(values.values(), itertools.cycle(shades), strict=False)):
        axes.barh(index, value, color=shade)
        axes.annotate(f" {short(value)}", (value, index), va="center", fontsize="small")
    axes.set_yticks(range(len(values)), [name[-LABEL_CHARACTERS:] for name in values], fontsize="small")
    axes.invert_yaxis()
    axes.set(title=title, xlabel=unit, xlim=(0, max(values.values()) * 1.18))
    axes.grid(axis="x", alpha=0.3)


def over_steps(axes: Axes, title: str, unit: str) -> None:
    """Label the axes of curves over optimizer steps, counted from 1."""
    axes.set(title=title, xlabel="optimizer step", ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize="small")


def colour(index: int) -> str:
    """Return the colour of a series by its number."""
    return COLOURS[index % len(COLOURS)]


def line(index: int) -> str:
    """Return the line style of a series by its number."""
    return LINES[index % len(LINES)]


def label(name: str) -> str:
    """Return a name for the label of a bar, in at most two lines."""
    lines = textwrap.wrap(name, LABEL_CHARACTERS, max_lines=2, placeholder=" ...") or [name]
    return "\n".join(lines).replace("$", r"\$")  # $ starts a formula


def short(value: float) -> str:
    """Return a number for the label of a bar, in three digits."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
