"""What each variant saves and costs: memory and time against its baseline, as a pair of bars."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from pipeline.base.results import Outcome
from pipeline.report.answers import outcome_of, peak_text, readable, seconds_text
from pipeline.report.changes import NOISE, change_text, interval_text
from pipeline.report.plot import (
    ABOUT,
    GREY,
    LINE_PIXELS,
    WARNING,
    Panel,
    Plot,
    colour,
    data,
    label,
    layered,
    names_axis,
)
from pipeline.training.metrics import Row
from pipeline.training.time_differences import MEASURED, is_compared, time_change

SAVES, COSTS = colour(2), WARNING
REASON_CHARACTERS = 48
"""Characters of the reason for which a variant was skipped; the tooltip has all of it."""
MEASURES = ("memory", "time")
OVER = ", over the budget"
NARROW_PIXELS = 700
"""Width of a chart below which the bars have percentages alone."""
ROOMS = (60, 270)
"""Room for the text beside a bar in a narrow and in a wide chart, in pixels."""


def tradeoff_plot(comparisons: Mapping[str, Sequence[Row]]) -> Plot | None:
    """Return peak memory and time per sample of each variant against the baseline of its comparison.

    None if no variant was measured beside its baseline.
    """
    rows = [row for each in comparisons.values() for row in each]
    if not any(is_compared(row) for row in rows):
        return None
    baselines = [row.name for row in rows if row.is_baseline]
    against = baselines[0] if len(baselines) == 1 else "each baseline (bold)"
    title = f"peak memory (above) and time per sample (below) against {against}; green saves, red costs, grey: {NOISE}"
    labels = [_label(row, len(comparisons) > 1) for row in rows]
    height = max([40, *(LINE_PIXELS * len(label(name)) + 8 for name in labels)])
    panel = Panel(title=title, chart=_chart(rows, labels), height=height * len(rows))
    return Plot(name="saved_and_cost", title=title, panels=(panel,), is_wide=True)


def _label(row: Row, with_comparison: bool) -> str:
    return f"{readable(row.comparison)}: {row.name}" if row.is_baseline and with_comparison else row.name


def _chart(rows: Sequence[Row], labels: Sequence[str]) -> alt.LayerChart:
    pairs = [pair for place, row in enumerate(rows) for pair in _bars(place, row)]
    others = [other for place, row in enumerate(rows) for other in _text(place, row)]
    low = min([0.0, *(pair["percent"] for pair in pairs)])
    high = max([0.0, *(pair["percent"] for pair in pairs)])
    bold = [place for place, row in enumerate(rows) if row.is_baseline]
    axis = names_axis(labels)
    axis["labelFontWeight"] = {
        "condition": {"test": f"indexof({bold}, datum.value) >= 0", "value": "bold"},
        "value": "normal",
    }
    room = f"(width < {NARROW_PIXELS} ? {ROOMS[0]} : {ROOMS[1]})"
    left = room if low < 0 else "4"
    right = f"width - {room}" if high > 0 else "width - 4"
    y = alt.Y("place:O", axis=axis, scale=alt.Scale(domain=list(range(len(rows))), paddingInner=0.15))
    x = alt.X(
        "percent:Q",
        title="% against the baseline",
        scale=alt.Scale(domain=[low, high or 1.0], range=[alt.expr(left), alt.expr(right)], nice=False, zero=True),
        axis=alt.Axis(tickCount=alt.expr(f"width < {NARROW_PIXELS} ? 3 : 7")),
    )
    text = f"width < {NARROW_PIXELS} ? datum.narrow : datum.wide"
    base = alt.Chart(data(pairs)).encode(y=y, yOffset=alt.YOffset("measure:N", sort=list(MEASURES)), **ABOUT)
    said = alt.Chart(data(others)).encode(y=y, x=alt.datum(0), **ABOUT)
    on_left = -low > high  # there is more room on that side of zero
    ended_left, ended_right = (base.transform_filter(f"datum.percent {side} 0") for side in ("<", ">="))
    layers = [
        base.mark_bar(height={"band": 0.9}).encode(x=x, color=alt.Color("shade:N", scale=None)),
        alt.Chart(data([{"zero": 0}])).mark_rule(opacity=0.6).encode(x="zero:Q"),
        ended_left.mark_text(align="right", dx=-5, baseline="middle").encode(x="percent:Q"),
        ended_right.mark_text(align="left", dx=5, baseline="middle").encode(x="percent:Q"),
        said.mark_text(align="right" if on_left else "left", dx=-5 if on_left else 5, baseline="middle").encode(
            color=alt.Color("shade:N", scale=None)
        ),
    ]
    texts = alt.Text("text:N")
    written = [layer.transform_calculate(text=text).encode(text=texts) for layer in layers[2:]]
    return layered(*layers[:2], *written)


def _bars(place: int, row: Row) -> list[dict[str, Any]]:
    """Return the pair of bars of a variant that compares with its baseline."""
    time = time_change(row)
    if time is None or not is_compared(row):
        return []
    sizes = (peak_text(row), f"{interval_text(time)}, {seconds_text(row)}")
    percents = (round(0.0 - row.metrics["memory_saving_percent"], 1), round(time.percent, 1))
    pairs = list(zip(MEASURES, percents, sizes, strict=True))
    is_noise = {"memory": False, "time": not time.is_beyond_noise}
    is_over = row.outcome is Outcome.OVER_BUDGET
    about = "\n".join([row.name, *(f"{measure} {change_text(percent)}: {size}" for measure, percent, size in pairs)])
    return [
        {
            "place": place,
            "measure": measure,
            "percent": percent,
            "shade": GREY if is_noise[measure] else SAVES if percent <= 0 else COSTS,
            "wide": f"{measure} {change_text(percent)} ({size}{OVER if is_over and measure == 'memory' else ''})",
            "narrow": change_text(percent, 0),
            "about": f"{about}{OVER if is_over else ''}",
        }
        for measure, percent, size in pairs
    ]


def _text(place: int, row: Row) -> list[dict[str, Any]]:
    """Return what stands in the line of a variant without bars: the baseline's cost, or why there are none."""
    if _bars(place, row):
        return []
    cost = ""
    if row.completed and set(row.metrics) >= MEASURED:
        cost = f"{peak_text(row)}, {seconds_text(row)}"
    outcome = outcome_of(row).replace("_", " ")
    reason = row.skipped or (row.result.detail if row.result else None) or ""
    if row.is_baseline and row.completed:
        is_over = row.outcome is Outcome.OVER_BUDGET
        wide, narrow = f"{cost}{OVER if is_over else ''}", "baseline"
    elif row.completed:
        wide, narrow = f"not comparable with the baseline: {cost}", "not comparable"
    else:
        wide = narrow = outcome
        if row.skipped:
            wide = f"skipped: {textwrap.shorten(row.skipped, REASON_CHARACTERS, placeholder=' …')}"
    shade = "currentColor" if row.completed or row.skipped else WARNING
    return [
        {"place": place, "shade": shade, "wide": wide, "narrow": narrow}
        | {"about": "\n".join(part for part in (row.name, wide, reason) if part)}
    ]
