"""The losses of runs over their optimizer steps, above their differences from the baseline's."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import altair as alt

from pipeline.report.comparable import of_other_data
from pipeline.report.curves import OVER, Series, curves, lines, over_steps
from pipeline.report.plot import Panel, layered, whole_axis
from pipeline.training.metrics import Row

T = TypeVar("T")
HEIGHT, UPPER_PIXELS, LOWER_PIXELS = 370, 230, 110
"""Heights of both charts, of the losses and of the differences."""
FITTED = alt.Scale(zero=False, nice=False)


def losses(rows: Sequence[Row]) -> dict[str, list[tuple[float, float | None]]]:
    """Return the loss of each optimizer step, counted from 1, of each variant that has one.

    Losses of runs that diverged are gaps where they are far above all others.
    """
    usual = [record.loss for row in rows if row.completed for record in row.steps]
    limit = 2 * max(usual) - min(usual) if usual else math.inf
    return {
        row.name: [(record.step + 1, record.loss if record.loss <= limit else None) for record in row.steps]
        for row in rows
        if row.steps
    }


def in_common(own: Sequence[tuple[float, T]], other: Sequence[tuple[float, T]]) -> list[tuple[float, T, T]]:
    """Return the steps that two runs have in common, with the values of both: a resumed run begins later."""
    values = dict(other)
    return [(step, value, values[step]) for step, value in own if step in values]


def colour_numbers(rows: Sequence[Row]) -> dict[str, int]:
    """Return the number of each variant, by which it has the same colour in each chart."""
    return {row.name: number for number, row in enumerate(rows)}


def losses_panel(rows: Sequence[Row], of: str = "") -> Panel:
    """Return the losses of variants, of the comparison `of`, with their differences from the baseline's below.

    There are differences where model, data and effective batch are the same.
    """
    found, baseline = losses(rows), next((row for row in rows if row.is_baseline), rows[0])
    alike = [row.name for row in rows if row.name in found and not of_other_data(row, baseline)]
    title = f"{of}{': ' if of else ''}loss of each optimizer step"
    parts = {"loss": found}
    if baseline.name in found and len(alike) > 1:
        title += f" (below: the difference from {baseline.name})"
        parts["difference"] = {
            name: [(step, _less(own, other)) for step, own, other in in_common(found[name], found[baseline.name])]
            for name in alike
        }
    return Panel(title=title, chart=_stacked(rows[0].comparison, parts, colour_numbers(rows)), height=HEIGHT)


def seconds_panel(rows: Sequence[Row]) -> Panel:
    """Return the time of each optimizer step."""
    seconds = {row.name: [(record.step + 1, record.seconds) for record in row.steps] for row in rows if row.steps}
    return curves(
        "time of each optimizer step",
        seconds,
        "seconds",
        scale=alt.Scale(zero=True),
        colour_numbers=colour_numbers(rows),
    )


def _less(loss: float | None, other: float | None) -> float | None:
    return None if loss is None or other is None else loss - other


def _stacked(name: str, parts: Mapping[str, Series], numbers: Mapping[str, int]) -> alt.LayerChart:
    """Return curves of the losses, and of the differences if there are any, that share steps, zoom and legend."""
    shown = parts["loss"]
    last = max(step for series in shown.values() for step, _ in series)
    slug = re.sub(r"\W+", "_", name)
    steps = alt.binding_range(min=1, max=max(2, last - 1), step=1, name="from step")
    first = alt.param(name=f"first_{slug}", value=1, bind=steps)
    x = alt.X("x:Q", title=OVER, axis=whole_axis(int(last), grid=False), scale=FITTED)
    base, params = over_steps(slug, numbers, shown, x)
    base = base.transform_filter(f"datum.x >= {first.name}")
    ranges = {"loss": (0, UPPER_PIXELS), "difference": (HEIGHT - LOWER_PIXELS, HEIGHT)}
    layers = []
    for unit, series in parts.items():
        top, bottom = ranges[unit] if len(parts) > 1 else (0, HEIGHT)
        scale = alt.Scale(zero=False, range=[bottom, top])
        axis = alt.Axis(orient="left", tickCount=(bottom - top) // 40)
        layers.append(lines(base, series, unit, alt.Y("y:Q", title=unit, scale=scale, axis=axis)))
    layers[0] = layers[0].properties(name=f"view_{slug}").add_params(*params, first)
    return layered(*layers, resolve=alt.Resolve(scale={"y": "independent"}))
