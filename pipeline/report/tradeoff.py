"""What each variant saves and costs: memory and time against the baseline of its comparison, as a pair of bars."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from pipeline.base.results import Outcome
from pipeline.report.answers import outcome_of, peak_text, readable, time_text
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

TITLE = f"memory (above) and time per sample (below): green less, red more, grey {NOISE}; lines: 95 % intervals"
LESS, MORE = colour(2), WARNING
REASON_CHARACTERS = 48
"""Characters of the reason for which a variant was skipped; the tooltip has all of it."""
MEASURES = ("memory", "time")
OVER = ", over the budget"
NARROW_PIXELS = 500
"""Width of a chart below which bars are not named."""
ROOMS = (60, 110)
"""Room for the text beside a bar in a narrow and in a wide chart, in pixels."""


def tradeoff_plots(comparisons: Mapping[str, Sequence[Row]]) -> tuple[Plot, ...]:
    """Return the changes of peak memory and of time per sample by each variant, one plot for each baseline."""
    shown = {
        name: rows
        for name, rows in comparisons.items()
        if any(map(is_compared, rows)) and any(row.is_baseline for row in rows)
    }
    return tuple(_plot(name, rows, len(comparisons) > 1) for name, rows in shown.items())


def _plot(name: str, rows: Sequence[Row], is_one_of_several: bool) -> Plot:
    of, baseline = f"{readable(name)}: " if is_one_of_several else "", next(row for row in rows if row.is_baseline)
    title = f"{of}against {baseline.name} ({peak_text(baseline)}, {time_text(baseline)} per sample)"
    height = max([40, *(LINE_PIXELS * len(label(row.name)) + 8 for row in rows)])
    panel = Panel(title=title, chart=_chart(rows), height=height * (len(rows) - 1))
    return panel.alone(f"changes_{name}", is_wide=True)


def _chart(rows: Sequence[Row]) -> alt.LayerChart:
    variants = [row for row in rows if not row.is_baseline]
    pairs = [pair for place, row in enumerate(variants) for pair in _bars(place, row)]
    others = [_text(place, row) for place, row in enumerate(variants) if not _bars(place, row)]
    low = min([0.0, *(pair["low"] for pair in pairs)])
    high = max([0.0, *(pair["high"] for pair in pairs)])
    room = f"(width < {NARROW_PIXELS} ? {ROOMS[0]} : {ROOMS[1]})"
    left = room if low < 0 else "4"
    right = f"width - {room}" if high > 0 else "width - 4"
    places = alt.Scale(domain=list(range(len(variants))), paddingInner=0.15)
    y = alt.Y("place:O", axis=names_axis([row.name for row in variants]), scale=places)
    x = alt.X(
        "percent:Q",
        title="change, %",
        scale=alt.Scale(domain=[low, high or 1.0], range=[alt.expr(left), alt.expr(right)], nice=False, zero=True),
        axis=alt.Axis(tickCount=alt.expr(f"width < {NARROW_PIXELS} ? 3 : 7")),
    )
    text = f"(width < {NARROW_PIXELS} ? '' : datum.measure + ' ') + datum.text"
    base = alt.Chart(data(pairs)).encode(y=y, yOffset=alt.YOffset("measure:N", sort=list(MEASURES)), **ABOUT)
    ended_left, ended_right = (
        base.transform_filter(f"datum.percent {side} 0").transform_calculate(shown=text) for side in ("<", ">=")
    )
    # Beside zero there is more room on one side.
    side: dict[str, Any] = {"align": "right", "dx": -5} if -low > high else {"align": "left", "dx": 5}
    return layered(
        base.mark_bar(height={"band": 0.9}).encode(x=x, color=alt.Color("shade:N", scale=None)),
        base.properties(name="intervals").mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q"),
        alt.Chart(data([{"zero": 0}])).mark_rule(opacity=0.6).encode(x="zero:Q"),
        ended_left.mark_text(align="right", dx=-5, baseline="middle").encode(x="low:Q", text="shown:N"),
        ended_right.mark_text(align="left", dx=5, baseline="middle").encode(x="high:Q", text="shown:N"),
        alt.Chart(data(others))
        .mark_text(baseline="middle", **side)
        .encode(y=y, x=alt.datum(0), text="text:N", color=alt.Color("shade:N", scale=None), **ABOUT),
    )


def _bars(place: int, row: Row) -> list[dict[str, Any]]:
    """Return the pair of bars of a variant that compares with its baseline; memory is the same in each run."""
    time = time_change(row)
    if time is None or not is_compared(row):
        return []
    memory = round(0.0 - row.metrics["memory_saving_percent"], 1)
    over = OVER if row.outcome is Outcome.OVER_BUDGET else ""
    about = [
        f"{row.name}{over}",
        f"memory {change_text(memory)}: {peak_text(row)}",
        f"time {change_text(time.percent)} ({interval_text(time)}): {time_text(row)} per sample",
    ]
    intervals = {"memory": (memory, memory, memory), "time": (time.percent, time.low, time.high)}
    return [
        {
            "place": place,
            "measure": measure,
            **{
                name: round(value, 1)
                for name, value in zip(("percent", "low", "high"), intervals[measure], strict=True)
            },
            "shade": GREY if measure == "time" and not time.is_beyond_noise else LESS if percent <= 0 else MORE,
            "text": f"{change_text(percent, 0)}{over if measure == 'memory' else ''}",
            "about": "\n".join(about),
        }
        for measure, (percent, *_) in intervals.items()
    ]


def _text(place: int, row: Row) -> dict[str, Any]:
    """Return what stands in the line of a variant without bars: why there are none."""
    text, reason = outcome_of(row).replace("_", " "), row.skipped or (row.result.detail if row.result else None) or ""
    if row.skipped:
        text = f"skipped: {textwrap.shorten(row.skipped, REASON_CHARACTERS, placeholder=' …')}"
    elif row.completed:
        measured = set(row.metrics) >= MEASURED
        reason = f"{peak_text(row)}, {time_text(row)} per sample" if measured else ""
        text = "not comparable with the baseline"
    about = "\n".join(part for part in (row.name, text, reason) if part)
    return {
        "place": place,
        "shade": "currentColor" if row.completed or row.skipped else WARNING,
        "text": text,
        "about": about,
    }
