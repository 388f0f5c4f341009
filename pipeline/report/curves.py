"""Lines over the optimizer steps of runs: each has its colour in all charts, and one of several can stand out."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from pipeline.report.plot import ABOUT, COLOURS, WARNING, Panel, colour, data, label, layered

DASHES = ([1, 0], [6, 3], [6, 3, 1, 3], [2, 2])
ALL = "all"
"""The choice of a menu with which no run stands out."""
OVER = "optimizer step"
MOST_MARKED = 40
"""Steps up to which each is marked by a point."""
NUM_POINTS = 500
MOST_POINTS = 1000
"""Points of a curve and of all curves of a chart; of longer ones every n-th is drawn, and the last one."""
Series = Mapping[str, Sequence[tuple[float, float | None]]]
"""The points (x, y) of each line, by its name."""


def curves(
    title: str,
    series: Series,
    unit: str,
    *,
    scale: alt.Scale | None = None,
    crosses: Series | None = None,
    colour_numbers: Mapping[str, int] | None = None,
) -> Panel:
    """Return a line for each series of points (x, y); one chosen in the legend stands out, alt and wheel zooms.

    `crosses` marks points of the line of its name. A y that is None or not finite is a gap.
    `colour_numbers` are the numbers by which the series have their colours and dashes, in their own order by default.
    """
    slug = re.sub(r"\W+", "_", title)
    has_points = any(y is not None and math.isfinite(y) for points in series.values() for _, y in points)
    empty = alt.Scale(domain=[0, 1])
    x_scale = alt.Scale(zero=False, nice=False) if has_points else empty
    y_scale = (scale or alt.Scale(zero=False)) if has_points else empty
    x = alt.X("x:Q", title=OVER, axis=alt.Axis(tickMinStep=1, format="d"), scale=x_scale)
    y = alt.Y("y:Q", title=unit, scale=y_scale)
    base, params = over_steps(slug, colour_numbers or {name: number for number, name in enumerate(series)}, series, x)
    main = lines(base, series, unit, y)
    layers: list[alt.Chart] = [main.properties(name=f"view_{slug}").add_params(*params)]
    if crosses and any(crosses.values()):
        at = alt.Chart(points(crosses)).transform_calculate(about=about_point(unit))
        layers.append(
            at.mark_point(shape="cross", angle=45, size=60, filled=True).encode(
                x=x, y=y, color=alt.value(WARNING), **ABOUT
            )
        )
    return Panel(title=title, chart=layered(*layers))


def over_steps(
    slug: str, colour_numbers: Mapping[str, int], shown: Iterable[str], x: alt.X
) -> tuple[alt.Chart, list[alt.Parameter]]:
    """Return what lines of runs over `x` have in common, and the parameters by which they are chosen and zoomed."""
    names = list(shown)
    chosen = alt.selection_point(name=f"chosen_{slug}", fields=["run"], bind="legend")
    zoomed = alt.selection_interval(name=f"zoomed_{slug}", bind="scales", encodings=["x"], zoom="wheel![event.altKey]")
    params: list[alt.Parameter] = [chosen, zoomed]
    opacity: Any = alt.value(1)
    if len(names) > 1:  # one can stand out, by its legend or a menu
        menu = alt.binding_select(options=[ALL, *names], name="highlighted")
        highlighted = alt.param(name=f"highlighted_{slug}", value=ALL, bind=menu)
        is_other, faint = f"{highlighted.name} != '{ALL}' && {highlighted.name} != datum.run", alt.value(0.1)
        params.insert(1, highlighted)
        opacity = alt.when(is_other).then(faint).when(chosen).then(alt.value(1)).otherwise(faint)
    numbers = [colour_numbers[name] for name in names]
    shades = alt.Scale(domain=names, range=[colour(number) for number in numbers])
    turns = [number + number // len(COLOURS) for number in numbers]  # the ninth has the colour of the first
    dashes = alt.Scale(domain=names, range=[DASHES[turn % len(DASHES)] for turn in turns])
    labels = json.dumps({name: label(name) for name in names})
    legend = alt.Legend(labelExpr=f"{labels}[datum.value]", symbolType="stroke", symbolSize=250, symbolStrokeWidth=3)
    color, dash = alt.Color("run:N", scale=shades, legend=legend), alt.StrokeDash("run:N", scale=dashes, legend=legend)
    return alt.Chart().encode(x=x, color=color, strokeDash=dash, opacity=opacity, **ABOUT), params


def lines(base: alt.Chart, series: Series, unit: str, y: alt.Y) -> alt.Chart:
    """Return a line for each series, over a chart of over_steps(); of few steps each is marked by a point."""
    marks = alt.OverlayMarkDef(size=36, fillOpacity=1 if max(map(len, series.values())) <= MOST_MARKED else 0.01)
    drawn = base.properties(data=points(series)).transform_calculate(about=about_point(unit))
    line: alt.Chart = drawn.mark_line(strokeWidth=2, point=marks).encode(y=y)
    return line


def points(series: Series) -> alt.Data:
    """Return the points (x, y) of each series as data with the fields `run`, `x` and `y`."""
    limit = max(2, min(NUM_POINTS, MOST_POINTS // max(1, len(series))))
    found = []
    for name, line in series.items():
        every = -(-len(line) // limit) or 1
        for number, (x, y) in enumerate(line):
            if number % every == 0 or number == len(line) - 1:
                known = float(f"{y:.7g}") if y is not None and math.isfinite(y) else None
                found.append({"run": name, "x": x, "y": known})
    return data(found)


def about_point(unit: str) -> str:
    """Return the expression of the details of one of `points`."""
    before, after = json.dumps(f"\n{OVER} "), json.dumps(f" {unit}")
    value = f"isValid(datum.y) ? format(datum.y, ',.4~g') + {after} : 'not finite'"
    return f"datum.run + {before} + format(datum.x, ',.4~g') + ': ' + ({value})"
