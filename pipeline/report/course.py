"""The memory during one optimizer step as stacked categories, and the largest tensors at each moment."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import altair as alt

from pipeline.base.units import MIB
from pipeline.memory.breakdown import LiveTensor, StepMemory
from pipeline.memory.timeline import CATEGORIES
from pipeline.report.phases import PHASE_COLOURS
from pipeline.report.plot import ABOUT, WARNING, Panel, Plot, colour, data, layered, mib_text, short

NARROW_SHARE = 0.08
"""Share of the step below which a phase has no room for its name, which is in the legend alone then."""
PHASE_OPACITY = 0.18
PEAK_PIXELS = 3
"""Width of the peak, which may last less than a pixel."""


def category_scale(names: Collection[str]) -> alt.Scale:
    """Return the colours of these categories, which are the same in all charts."""
    shown = [number for number, name in enumerate(CATEGORIES) if name in names]
    return alt.Scale(domain=[CATEGORIES[number] for number in shown], range=[colour(number) for number in shown])


SECOND_STEP = "memory during the second optimizer step, by category"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What the horizontal axis counts."""

    title: str
    unit: str
    """In which a moment is named; empty where events are counted."""
    per_second: float


RECORDED = Axis(title="ms, with the recorder's overhead", unit=" ms", per_second=1000)
MILLISECONDS = Axis(title="ms of the optimizer step", unit=" ms", per_second=1000)
EVENTS = Axis(title="allocations and releases", unit="", per_second=1)


def course_plot(course: StepMemory, title: str = SECOND_STEP, axis: Axis = MILLISECONDS) -> Plot:
    """Return memory over time by category, the phases shaded, the peak marked, and a moment to move."""
    moments = _moments(course, axis)
    highest = max(moments, key=lambda moment: moment["total"])
    panel = Panel(title=title, chart=_chart(course, moments, highest, axis), height=380, details=highest["details"])
    return panel.alone("memory", is_wide=True)


def _chart(course: StepMemory, moments: list[dict[str, Any]], highest: dict[str, Any], axis: Axis) -> alt.LayerChart:
    last = axis.per_second * course.seconds[-1]
    ends = [*(axis.per_second * begin for _, begin in course.phases[1:]), last]
    phases: list[dict[str, Any]] = [
        {
            "start": axis.per_second * begin,
            "end": end,
            "middle": (axis.per_second * begin + end) / 2,
            "phase": phase,
            "name": phase if end - axis.per_second * begin > NARROW_SHARE * last else "",
        }
        for (phase, begin), end in zip(course.phases, ends, strict=True)
    ]
    x = alt.X("ms:Q", title=axis.title, scale=alt.Scale(domain=[0, last], nice=False))
    top = alt.Scale(domain=[0, 1.12 * highest["total"]], nice=False)
    slider = alt.binding_range(min=0, max=len(moments) - 1, step=1, name="moment")
    moment = alt.param(name="moment", value=highest["moment"], bind=slider)
    behind = alt.Chart(data(phases))
    over = alt.Chart()
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
        for chart in (over, alt.Chart(data([highest])))
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
        over.transform_filter(f"datum.moment == {moment.name}")
        .mark_rule(strokeWidth=1.5, strokeDash=[4, 3], opacity=0.8)
        .encode(x="ms:Q"),
        column.mark_bar(width=PEAK_PIXELS).properties(name="peak"),
        over.mark_rect(fillOpacity=0).encode(x="ms:Q", x2="end:Q", **ABOUT).properties(name="moments"),
        peak.mark_point(shape="triangle-down", filled=True, size=90, color=WARNING, yOffset=-6, opacity=1),
        peak.mark_text(color=WARNING, dx=10 if is_left else -10, dy=-12, align="left" if is_left else "right").encode(
            text=alt.value(f"peak {mib_text(highest['total'])}")
        ),
        data=data(moments, "moments"),
    ).add_params(moment)


def _moments(course: StepMemory, axis: Axis) -> list[dict[str, Any]]:
    """Return the memory at each moment in MiB by category, and the details of it."""
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
        total, at = sum(parts.values()), axis.per_second * course.seconds[moment.event]
        sizes = ", ".join(f"{name} {mib_text(size)}" for name, size in parts.items() if size)
        phase = next(name for name, begin in reversed(course.phases) if axis.per_second * begin <= at)
        where = f"{mib_text(total)} at {short(at)}{axis.unit}, in {phase}"
        lines = [_described(course.tensors[place]) for place in moment.largest]
        found.append(
            {
                "moment": number,
                "ms": round(at, 3),
                "end": round(axis.per_second * course.seconds[following], 3),
                "total": total,
            }
            | {"about": f"{where}\n{sizes}", "details": "\n".join([f"{where}; the largest tensors alive:", *lines])}
            | {name: round(size, 3) for name, size in parts.items()}
        )
    return found


def _described(tensor: LiveTensor) -> str:
    shape = " x ".join(map(str, tensor.shape))
    where = tensor.module or "the whole model"
    kind = f"{shape} {tensor.dtype}, " if tensor.shape else ""
    return f"{mib_text(tensor.num_bytes / MIB)}, {where}: {tensor.operator}, {kind}{tensor.category}"
