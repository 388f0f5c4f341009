"""A plot of one or more panels, each one Altair specification: interactive on the page, and all of them as one PNG."""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, cast

import altair as alt
import vl_convert
from altair.utils.schemapi import debug_mode

from pipeline.base.files import cache_folder, write_atomically
from pipeline.base.units import in_four_digits

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C8C8C")
"""Okabe and Ito's palette for colour-blind readers (jfly.uni-koeln.de/color), with grey for black, which a dark page
would hide."""
WARNING = COLOURS[5]
"""The colour of configurations that do not fit and of failed runs."""
GREY = COLOURS[7]
PANEL_PIXELS = 480
"""Width of a panel in a PNG; on the page a panel is as wide as its place."""
WIDTH = re.compile(r"\bwidth\b")
"""The width of a panel in pixels, in an expression."""
EXPRESSION = re.compile(r'"(?:calculate|expr|filter)": "(?:[^"\\]|\\.)*"')
LEGENDS = ("color", "fill", "stroke", "shape", "strokeDash")
"""Channels of which each panel of a picture has its own legend."""
DOTS_PER_INCH = 140
TEXT_SHARE = 0.2
"""Share of a narrow chart's width that the text of a bar takes."""
FEW_TICKS = 20
"""Ticks of an axis of whole numbers that are all drawn."""
LABEL_CHARACTERS = 24
LABEL_LINES = 4
"""Lines of the label of a bar or in a legend; a longer name keeps its begin and its end."""
LABEL_PIXELS = 180
LEAST_MIB = 0.001
"""A smaller size is not written in digits."""
CHARACTER_PIXELS = 7
"""Width of a character of a label, about."""
LINE_PIXELS = 15
"""Height of a line of text."""
TEXT = {"labelColor": "currentColor", "titleColor": "currentColor"}
CONFIG: dict[str, Any] = {
    # currentColor: the text of the page, light or dark; black in a PNG.
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axisXQuantitative": {"labelFlush": 15},  # pixels from an end within which a label keeps inside the chart
    "axis": {
        **TEXT,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelOverlap": "greedy",
        "labelSeparation": 6,
        "grid": True,
        "gridColor": "currentColor",
        "gridOpacity": 0.12,
        "domainColor": "currentColor",
        "domainOpacity": 0.4,
        "tickColor": "currentColor",
        "tickOpacity": 0.4,
    },
    "legend": {
        **TEXT,
        "orient": "bottom",
        "columns": 2,
        "labelFontSize": 12,
        "labelLimit": 190,
        "title": None,
        "symbolOpacity": 1,
    },
    "title": {"color": "currentColor", "anchor": "start", "fontSize": 14},
    "text": {"color": "currentColor", "fontSize": 12},
    "rule": {"color": "currentColor"},
}

Chart = alt.Chart | alt.LayerChart
ABOUT: dict[str, Any] = {"tooltip": alt.Tooltip("about:N"), "description": alt.Description("about:N")}
"""Encodings of a mark: its line's `about` is what a pointer and a screen reader tell of it."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart with its title."""

    title: str
    chart: Chart
    height: int = 280
    """In pixels, without axes and legend."""
    what_if: str | None = None
    """The answer below it, which page.js replaces by that for another budget; its data are `configurations`."""
    details: str | None = None
    """The details of one of its `moments` below it, which page.js replaces by those of another."""
    follows: str | None = None
    """What is known of the configuration whose `parts` it shows; page.js replaces both by what the pointer is on in the
    panel before it."""

    def to_spec(self) -> dict[str, Any]:
        """Return the Vega-Lite specification for the page, as wide as its place; the page itself has the title."""
        fitted = alt.AutoSizeParams(type="fit-x", contains="padding")
        spec = self.chart.properties(width="container", height=self.height, autosize=fitted, description=self.title)
        return {**_dict(spec), "background": None}

    def alone(self, name: str, *, is_wide: bool = False) -> "Plot":
        """Return the plot that has this panel alone, and its title."""
        return Plot(name=name, title=self.title, panels=(self,), is_wide=is_wide)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Panels under one title."""

    name: str
    """File name without suffix."""
    title: str
    panels: tuple[Panel, ...]
    given: str = ""
    """Where the controls stand at first, which a PNG says as well."""
    is_wide: bool = False
    """Whether it has the whole width of the page."""

    def to_png(self) -> bytes:
        """Return one PNG of all panels, in two columns."""
        width = PANEL_PIXELS * (2 if self.is_wide else 1)
        charts = [panel.chart.properties(width=width, height=panel.height, title=panel.title) for panel in self.panels]
        whole = alt.concat(*charts, columns=2)
        whole = whole.properties(resolve=alt.Resolve(scale=dict.fromkeys(LEGENDS, "independent")))
        if any(panel.title != self.title for panel in self.panels):
            title = f"{self.title}, with {self.given}" if self.given else self.title
            whole = whole.properties(title=alt.TitleParams(title, anchor="middle", fontSize=18, offset=12))
        # Charts side by side have no signal of their own width.
        fixed = EXPRESSION.sub(lambda found: WIDTH.sub(str(width), found[0]), json.dumps(_dict(whole)))
        spec = {**json.loads(fixed), "background": "white", "padding": 12}
        return vl_convert.vegalite_to_png(spec, vl_version=VERSION, ppi=DOTS_PER_INCH)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A horizontal bar."""

    name: str
    value: float | None
    """Its end; None where there is only `text`."""
    shade: str
    text: str | None = None
    """What stands at its end; the value where it is None."""
    start: float = 0.0


def bars(title: str, values: Sequence[Bar], unit: str, marks: Mapping[str, float] | None = None) -> Panel:
    """Return a horizontal bar for each value, with its text, and a dashed line at each of `marks`."""
    marks = marks or {}
    ends = [max(bar.start, bar.value or 0.0) for bar in values]
    longest = max([*ends, *marks.values()], default=0.0) or 1.0
    lowest = min([0.0, *(min(bar.start, bar.value or 0.0) for bar in values)])
    lines = [
        {
            "place": place,
            "start": bar.start,
            "value": bar.value,
            # A text that a mark would cross on a narrow screen stands beyond it.
            "end": max([end, *(mark for mark in marks.values() if 0 <= mark - end < TEXT_SHARE * longest)]),
            "shade": bar.shade,
            "text": f" {short(bar.value or 0.0) if bar.text is None else bar.text}",
            "about": f"{bar.name}\n{_about(bar, unit)}",
        }
        for place, (bar, end) in enumerate(zip(values, ends, strict=True))
    ]
    y = alt.Y("place:O", axis=names_axis([bar.name for bar in values]))
    # For the longest text after a bar, in pixels; where there is no bar, a text begins at zero.
    room = 12 + CHARACTER_PIXELS * max(
        (len(str(line["text"])) for line in lines if line["value"] is not None), default=0
    )
    scale = alt.Scale(domain=[lowest * 1.1, longest], range=[0, alt.expr(f"width - {room}")], nice=False, zero=False)
    x = alt.X("value:Q", title=unit, scale=scale, axis=alt.Axis(tickCount=5))
    base = alt.Chart().encode(y=y, **ABOUT)
    layers: list[alt.Chart] = [
        base.mark_bar(height={"band": 0.7}).encode(x=x, x2="start:Q", color=alt.Color("shade:N", scale=None)),
        base.mark_text(align="left", baseline="middle", dx=3).encode(x="end:Q", text="text:N"),
    ]
    for name, value in marks.items():
        at = alt.Chart(data([{"value": value, "about": f"{name} {short(value)} {unit}"}]))
        layers.append(at.mark_rule(color=WARNING, strokeDash=[6, 3], strokeWidth=2).encode(x="value:Q", **ABOUT))
        layers.append(
            at.mark_text(color=WARNING, align="right", dx=-4, dy=-4, baseline="bottom").encode(
                x="value:Q", y=alt.value(0), text="about:N"
            )
        )
    return Panel(
        title=title, chart=layered(*layers, data=data(lines)), height=names_height([bar.name for bar in values])
    )


def data(values: Sequence[Mapping[str, Any]], name: str | None = None) -> alt.Data:
    """Return data that stand in the specification itself."""
    with debug_mode(False):  # which would validate every line
        return alt.Data(values=list(values), **({} if name is None else {"name": name}))  # type: ignore[no-untyped-call]


def layered(*charts: alt.Chart, **shared: Any) -> alt.LayerChart:
    """Return charts over each other; alt.layer() without facets."""
    return cast("alt.LayerChart", alt.layer(*charts, **shared))


def names_axis(names: Sequence[str]) -> alt.Axis:
    """Return an axis that shows, for the place of a name in `names`, the name in lines."""
    lines = [label(name) for name in names]
    offsets = [
        {"test": f"length({json.dumps(lines)}[datum.value]) == {count}", "value": -LINE_PIXELS * (count - 1) / 2}
        for count in range(2, LABEL_LINES + 1)
    ]
    axis = alt.Axis(
        title=None,
        labelExpr=f"{json.dumps(lines)}[datum.value]",
        labelLimit=LABEL_PIXELS,
        labelPadding=6,
        ticks=False,
        domain=False,
        grid=False,
    )
    axis["labelOffset"] = {"condition": offsets, "value": 0}  # a label begins at its place, and is to be centred
    return axis


def whole_axis(last: int, *, grid: bool = True) -> alt.Axis:
    """Return an axis of the whole numbers from 1 to `last`; of few numbers each has its tick, and no fraction has."""
    axis = alt.Axis(tickMinStep=1, format="d", grid=grid)
    if last <= FEW_TICKS:
        axis["values"] = list(range(1, last + 1))
    return axis


def names_height(names: Sequence[str], least: int = 34) -> int:
    """Return the height of a chart with a line for each name, of `least` pixels or as many as the longest needs."""
    line = max([least, *(LINE_PIXELS * len(label(name)) + 4 for name in names)])
    return max(60, line * len(names))


def names_width(names: Sequence[str]) -> int:
    """Return the width of the labels of names_axis(), in pixels."""
    longest = max((len(line) for name in names for line in label(name)), default=0)
    return min(LABEL_PIXELS, CHARACTER_PIXELS * longest + 6)


def colour(index: int) -> str:
    """Return the colour of a series by its number."""
    return COLOURS[index % len(COLOURS)]


def label(name: str) -> list[str]:
    """Return a name in lines for a label, the last one its end."""
    lines = textwrap.wrap(name, LABEL_CHARACTERS) or [name]
    return lines if len(lines) <= LABEL_LINES else [*lines[: LABEL_LINES - 2], "…", lines[-1]]


def mib_text(mib: float) -> str:
    """Return a size with its unit, in four digits or all that stand before the point."""
    if 0 < mib < LEAST_MIB:
        return f"< {LEAST_MIB} MiB"
    return f"{in_four_digits(mib)} MiB"


def short(value: float) -> str:
    """Return a number for the label of a bar, in three digits."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


@cache
def javascript() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, which defines `vegaEmbed`; it takes seconds to bundle."""
    file = cache_folder() / f"vega-embed-{VERSION}-{version('vl-convert-python')}.js"
    if not file.exists():
        script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed", vl_version=VERSION)
        write_atomically(file, script.encode())
    return file.read_text()


def _about(bar: Bar, unit: str) -> str:
    if bar.value is None:
        return bar.text or ""
    if bar.start:
        return f"{'+' * (bar.value >= bar.start)}{short(bar.value - bar.start)} {unit}, to {short(bar.value)}"
    return f"{short(bar.value)} {unit}"


def _dict(chart: alt.TopLevelMixin) -> dict[str, Any]:
    spec: dict[str, Any] = chart.to_dict(validate=False)  # which takes most of its time; tests validate
    return {**spec, "config": CONFIG}


VERSION = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
"""The version of Vega-Lite that Altair writes."""
