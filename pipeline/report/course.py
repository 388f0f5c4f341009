"""The memory of one run: over an optimizer step by category, with the largest tensors, and at the end of each phase."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import altair as alt

from pipeline.base.units import MIB
from pipeline.memory.breakdown import StepMemory
from pipeline.memory.timeline import CATEGORIES, Storage
from pipeline.report.plot import ABOUT, WARNING, Bar, Panel, Plot, bars, colour, data, layered, mib_text, short
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
NARROW_SHARE = 0.08
"""Share of the step below which a phase has no room for its name, which is in the legend alone then."""
PHASE_OPACITY = 0.18
PEAK_PIXELS = 3
"""Width of the peak, which may last less than a pixel."""


def category_scale(names: Collection[str]) -> alt.Scale:
    """Return the colours of these categories, which are the same in all charts."""
    shown = [number for number, name in enumerate(CATEGORIES) if name in names]
    return alt.Scale(domain=[CATEGORIES[number] for number in shown], range=[colour(number) for number in shown])


def course_plot(course: StepMemory, title: str, over: str, *, is_timed: bool = True) -> Plot:
    """Return memory by category `over` time or events, the phases shaded, the peak marked, and a moment to move."""
    unit = " ms" if is_timed else ""
    if is_timed:
        phases = tuple((phase, 1000 * begin) for phase, begin in course.phases)
        course = replace(course, seconds=tuple(1000 * seconds for seconds in course.seconds), phases=phases)
    moments = _moments(course, unit)
    highest = max(moments, key=lambda moment: moment["total"])
    panel = Panel(title=title, chart=_chart(course, moments, highest, over), height=380, details=highest["details"])
    return panel.alone("memory", is_wide=True)


def _chart(course: StepMemory, moments: list[dict[str, Any]], highest: dict[str, Any], over: str) -> alt.LayerChart:
    last = course.seconds[-1]
    ends = [*(begin for _, begin in course.phases[1:]), last]
    phases: list[dict[str, Any]] = [
        {
            "start": begin,
            "end": end,
            "middle": (begin + end) / 2,
            "phase": phase,
            "name": phase if end - begin > NARROW_SHARE * last else "",
        }
        for (phase, begin), end in zip(course.phases, ends, strict=True)
    ]
    x = alt.X("ms:Q", title=over, scale=alt.Scale(domain=[0, last], nice=False))
    top = alt.Scale(domain=[0, 1.12 * highest["total"]], nice=False)
    slider = alt.binding_range(min=0, max=len(moments) - 1, step=1, name="moment")
    moment = alt.param(name="moment", value=highest["moment"], bind=slider)
    behind = alt.Chart(data(phases))
    above = alt.Chart()
    peak = alt.Chart(data([highest])).encode(x="ms:Q", y="total:Q", **ABOUT)
    names = [name for name in CATEGORIES if any(course.category_bytes.get(name, ()))]
    by_category: dict[str, Any] = {
        "x": x,
        "y": alt.Y("MiB:Q", stack="zero", title="MiB", scale=top),
        "color": alt.Color("category:N", scale=category_scale(names), legend=alt.Legend(title="memory")),
        "order": "order:Q",
    }
    areas, column = (
        chart.transform_fold([*names], as_=["category", "MiB"])
        .transform_calculate(order=f"indexof({names}, datum.category)")
        .encode(**by_category)
        for chart in (above, alt.Chart(data([highest])))
    )
    shown = list(dict.fromkeys(phase["phase"] for phase in phases))
    shades = alt.Scale(domain=shown, range=[PHASE_COLOURS[phase] for phase in shown])
    shade = alt.Fill("phase:N", scale=shades, legend=alt.Legend(title="phase", symbolOpacity=PHASE_OPACITY))
    is_left = highest["ms"] < last / 2
    # With `opacity` each mark would be a layer of the picture, which takes twice as long to draw.
    return layered(
        behind.mark_rect(fillOpacity=PHASE_OPACITY).encode(x="start:Q", x2="end:Q", fill=shade),
        areas.mark_area(interpolate="step-after", opacity=1, fillOpacity=0.85),
        behind.mark_text(baseline="top", dy=2).encode(x="middle:Q", y=alt.value(0), text="name:N"),
        above.transform_filter(f"datum.moment == {moment.name}")
        .mark_rule(strokeWidth=1.5, strokeDash=[4, 3], opacity=0.8)
        .encode(x="ms:Q"),
        column.mark_bar(width=PEAK_PIXELS).properties(name="peak"),
        above.mark_rect(fillOpacity=0).encode(x="ms:Q", x2="end:Q", **ABOUT).properties(name="moments"),
        peak.mark_point(shape="triangle-down", filled=True, size=90, color=WARNING, yOffset=-6, opacity=1),
        peak.mark_text(color=WARNING, dx=10 if is_left else -10, dy=-12, align="left" if is_left else "right").encode(
            text=alt.value(f"peak {mib_text(highest['total'])}")
        ),
        data=data(moments, "moments"),
    ).add_params(moment)


def _moments(course: StepMemory, unit: str) -> list[dict[str, Any]]:
    found = []
    events = [moment.event for moment in course.moments]
    for number, (moment, following) in enumerate(
        zip(course.moments, [*events[1:], len(course.seconds) - 1], strict=True)
    ):
        parts = {
            name: course.category_bytes[name][moment.event] / MIB
            for name in CATEGORIES
            if name in course.category_bytes
        }
        total, at = sum(parts.values()), course.seconds[moment.event]
        sizes = ", ".join(f"{name} {mib_text(size)}" for name, size in parts.items() if size)
        phase = next(name for name, begin in reversed(course.phases) if begin <= at)
        where = f"{mib_text(total)} at {short(at)}{unit}, in {phase}"
        lines = [_described(course.tensors[place]) for place in moment.largest]
        found.append(
            {
                "moment": number,
                "ms": round(at, 3),
                "end": round(course.seconds[following], 3),
                "total": total,
            }
            | {"about": f"{where}\n{sizes}", "details": "\n".join([f"{where}; the largest tensors alive:", *lines])}
            | {name: round(size, 3) for name, size in parts.items()}
        )
    return found


def _described(tensor: Storage) -> str:
    shape = " x ".join(map(str, tensor.shape))
    where = tensor.module or "the whole model"
    kind = f"{shape} {tensor.dtype}, " if tensor.shape else ""
    return f"{mib_text(tensor.num_bytes / MIB)}, {where}: {tensor.operator}, {kind}{tensor.category}"


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
