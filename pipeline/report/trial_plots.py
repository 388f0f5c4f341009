"""Plots of a search's trials: as they came, and by dimension."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from pipeline.base.units import MIB
from pipeline.report.plot import (
    ABOUT,
    GREY,
    WARNING,
    Panel,
    Plot,
    colour,
    data,
    layered,
    names_axis,
    short,
    whole_axis,
)
from pipeline.searching.results import SearchFindings
from pipeline.searching.trials import Trial, columns, label, measured, one_per_configuration
from pipeline.training.timing import mean_speed

BEFORE = "predicted before it ran"
NOT_COUNTED = "not counted"
"""Label of a trial that was slowed, or that fit where another one of its configuration did not."""
FITS = alt.Scale(
    domain=["fits", "over the budget", NOT_COUNTED, "did not complete", BEFORE],
    range=[colour(0), WARNING, GREY, GREY, colour(4)],
)
"""Colours of trials, the same in all charts of a search."""
FILLS = alt.Scale(domain=FITS.domain, range=[colour(0), WARNING, "transparent", GREY, "transparent"])
SHAPES = alt.Scale(domain=FITS.domain, range=["circle", "triangle-up", "square", "cross", "circle"])
BESIDE = "(datum.height < 0.5 ? 'left' : 'right')"
"""On which side of a value its text begins, so that the first and the last stay in the chart."""
PLACE_PIXELS = 56
"""Height of a dimension in parallel coordinates."""


def over_time_plot(findings: SearchFindings) -> Plot:
    """Return the throughput of each trial, and of the fastest configuration after it by all of its runs so far."""
    rows = findings.rows
    ordered = sorted(rows, key=lambda row: row.number)
    lines = [
        {"trial": number, "speed": row.tokens_per_second or 0, "fastest": fastest}
        | {"kind": _kind(row, findings), "about": f"trial {number}: {label(row.choice)}\n{row.summary}"}
        for number, (row, fastest) in enumerate(zip(ordered, fastest_so_far(ordered, findings), strict=True), 1)
    ]
    predicted = [
        {"trial": number, "speed": row.tokens_per_second * row.metrics["seconds_per_step"] / seconds}
        | {
            "kind": BEFORE,
            "about": f"trial {number}: {label(row.choice)}\npredicted before it ran: {short(seconds)} s a step",
        }
        for number, row in enumerate(ordered, 1)
        if (seconds := row.metrics.get("predicted_seconds_per_step")) and row.tokens_per_second
    ]
    base = alt.Chart().encode(
        x=alt.X("trial:Q", axis=whole_axis(len(rows)), scale=alt.Scale(domain=[0.5, len(rows) + 0.5])),
        **ABOUT,
    )
    y_title = findings.unit.replace("/s", " per second")
    line = base.mark_line(interpolate="step-after", color=colour(0), opacity=0.5)
    points = base.encode(
        y=alt.Y("speed:Q", title=y_title),
        stroke=alt.Stroke("kind:N", scale=FITS),
        fill=alt.Fill("kind:N", scale=FILLS),
        shape=alt.Shape("kind:N", scale=SHAPES),
    )
    layers = [line.encode(y=alt.Y("fastest:Q", title=y_title))]
    if predicted:
        hollow = points.properties(data=data(predicted))
        layers.append(hollow.mark_point(size=70, opacity=1, strokeWidth=1.5))
    layers.append(points.mark_point(size=70, opacity=1))
    if findings.best is not None:
        speed = findings.speed_of(findings.best.choice)
        at = alt.Chart(
            data([{"speed": speed, "about": f"the answer by all of its runs: {findings.speed_text(speed)}"}])
        )
        layers.append(at.mark_rule(color=colour(2), strokeDash=[6, 3]).encode(y="speed:Q", **ABOUT))
    chart = layered(*layers, data=data(lines))
    title = "trials as they came (line: the fastest that fits by the runs so far; dashed: the answer by all its runs)"
    return Panel(title=title, chart=chart).alone("trials_over_time")


def fastest_so_far(ordered: Sequence[Trial], findings: SearchFindings) -> list[float | None]:
    """Return the speed of the fastest configuration that fits after each trial, by the trials so far that count."""
    runs, speeds, fastest = dict[Any, list[float]](), dict[Any, float](), list[float | None]()
    for row in ordered:
        if row.fits and row.tokens_per_second and findings.is_counted(row):
            own = runs.setdefault(key := tuple(row.choice.values()), [])
            own.append(row.tokens_per_second)
            speeds[key] = mean_speed(own)
        fastest.append(max(speeds.values(), default=None))
    return fastest


def parallel_plot(findings: SearchFindings) -> Plot:
    """Return parallel coordinates: a line for each configuration through its values, memory and throughput."""
    rows, budget_bytes, best = findings.rows, findings.budget_bytes, findings.best
    ended = measured(one_per_configuration(rows))
    speeds = {row.number: findings.speed_of(row.choice) for row in ended}
    shown = columns(row.choice for row in rows)
    values = {name: sorted({row.choice[name] for row in rows}, key=_order) for name in shown}
    peak = max([budget_bytes, *(row.peak_bytes or 0 for row in ended)])
    speed = max(speeds.values(), default=1.0)
    places = [*shown.values(), "peak MiB", findings.unit]
    lines = []
    for row in sorted(ended, key=lambda row: _is_answer(row, best)):
        heights = [_height(values[name], row.choice[name]) for name in shown]
        heights += [(row.peak_bytes or 0) / peak, speeds[row.number] / speed]
        kind = "best" if _is_answer(row, best) else "fits" if row.fits else "over the budget"
        about = f"{label(row.choice)}\n{row.outcome}, {(row.peak_bytes or 0) / MIB:,.1f} MiB, "
        about += findings.speed_text(speeds[row.number])
        lines += [
            {"trial": row.number, "place": place, "height": height, "kind": kind, "about": about}
            for place, height in enumerate(heights)
        ]
    marks = [
        {"place": place, "height": _height(values[name], value), "text": str(value), "below": number % 2}
        for place, name in enumerate(shown)
        for number, value in enumerate(values[name])
    ]
    for place, greatest in ((len(shown), peak / MIB), (len(shown) + 1, speed)):
        marks += [{"place": place, "height": 0, "text": "0"}, {"place": place, "height": 1, "text": f"{greatest:,.0f}"}]
    budget = [{"place": len(shown), "height": budget_bytes / peak, "about": f"budget {budget_bytes / MIB:,.1f} MiB"}]
    kinds = alt.Scale(domain=["best", "fits", "over the budget"], range=[colour(2), colour(0), WARNING])
    base = alt.Chart().encode(
        x=alt.X("height:Q", axis=None, scale=alt.Scale(domain=[-0.02, 1.02], nice=False)),
        y=alt.Y("place:O", axis=names_axis(places), scale=alt.Scale(type="point", padding=0.5)),
        order="place:Q",
    )
    at = base.properties(data=data(marks))
    rails = base.properties(data=data([{"place": place, "height": 0, "end": 1} for place in range(len(places))]))
    chart = layered(
        rails.mark_rule(opacity=0.25).encode(x2="end:Q"),
        base.properties(data=data(lines))
        .mark_line(opacity=0.7)
        .encode(
            detail="trial:N",
            color=alt.Color("kind:N", scale=kinds),
            strokeWidth=alt.condition(alt.datum.kind == "best", alt.value(4), alt.value(1)),
            **ABOUT,
        ),
        base.properties(data=data(budget)).mark_tick(color=WARNING, thickness=3, size=24).encode(**ABOUT),
        at.mark_point(filled=True, size=30, color=GREY, opacity=1),
        at.mark_text(
            dy=alt.expr("datum.below ? 13 : -9"), dx=alt.expr(f"{BESIDE} == 'left' ? 6 : -6"), align=alt.expr(BESIDE)
        ).encode(text="text:N"),
    )
    title = "measured configurations by dimension: a line for each (red mark: the budget)"
    panel = Panel(title=title, chart=chart, height=PLACE_PIXELS * len(places))
    return panel.alone("parallel_coordinates", is_wide=True)


def _is_answer(row: Trial, best: Trial | None) -> bool:
    return best is not None and row.choice == best.choice


def _kind(row: Trial, findings: SearchFindings) -> str:
    if row.tokens_per_second is None:
        return "did not complete"
    if not findings.is_counted(row):
        return NOT_COUNTED
    return "fits" if row.fits else "over the budget"


def _order(value: object) -> tuple[bool, float, str]:
    """Return a sort key: numbers in their order, then names."""
    is_number = isinstance(value, int | float)
    return (not is_number, float(value) if isinstance(value, int | float) else 0.0, str(value))


def _height(values: Sequence[Any], value: object) -> float:
    return values.index(value) / (len(values) - 1) if len(values) > 1 else 0.5
