"""All configurations of a search's space as points: measured, predicted or refused, and the answer at any budget."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from pipeline.base.units import MIB
from pipeline.report.plot import ABOUT, GREY, WARNING, Bar, Panel, Plot, bars, colour, data, layered, short
from pipeline.searching.certificate import UNFIT
from pipeline.searching.results import (
    SearchFindings,
    heading,
    label,
    one_per_configuration,
    pareto_front,
    speed_of,
)

MEASURED, PREDICTED, REFUSED = "measured", "predicted, not measured", "predicted not to fit, or failed"
NUM_SHOWN = 2000
"""Configurations of the chart, so that the page stays small: the fastest of those that were not measured."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A configuration with its memory and speed, as far as they are measured or predicted."""

    choice: Mapping[str, Any]
    mib: float
    speed: float
    """Tokens per second."""
    kind: str
    """MEASURED, PREDICTED or REFUSED."""
    why: str
    """What is known of it, as text."""


def configurations_of(findings: SearchFindings) -> list[Configuration]:
    """Return the configurations with a known memory and speed: those that were measured, then the fastest predicted."""
    rows = findings.rows
    tokens = [
        row.metrics["tokens_per_second"] * row.metrics["seconds_per_step"]
        for row in rows
        if {"tokens_per_second", "seconds_per_step"} <= set(row.metrics)
    ]
    tokens_per_step = statistics.median(tokens) if tokens else 0.0
    verification = findings.verification
    failed = [one.choice for one in verification.measurements if one.outcome != "ok"] if verification else []
    found = []
    for row in one_per_configuration(rows):
        speed, peak_bytes = speed_of(row.choice, rows), row.peak_bytes
        is_measured = row.tokens_per_second is not None and row.choice not in failed
        seconds = row.metrics.get("predicted_seconds_per_step")
        if not speed and seconds:
            speed = tokens_per_step / seconds
        if speed and peak_bytes is not None:
            kind, why = (MEASURED, row.outcome) if is_measured else (REFUSED, f"failed: {row.outcome}")
            found.append(
                Configuration(choice=row.choice, mib=peak_bytes / MIB, speed=speed, kind=kind, why=f"measured, {why}")
            )
    unmeasured = [
        Configuration(
            choice=one.choice,
            mib=one.predicted_peak_bytes / MIB,
            speed=tokens_per_step / one.predicted_seconds_per_step,
            kind=REFUSED if one.reason == UNFIT else PREDICTED,
            why=f"not measured: {one.reason}",
        )
        for one in (findings.certificate.unmeasured if findings.certificate else ())
        if one.predicted_peak_bytes is not None and one.predicted_seconds_per_step
    ]
    return found + sorted(unmeasured, key=lambda one: -one.speed)[:NUM_SHOWN]


def plane_plot(findings: SearchFindings, configurations: Sequence[Configuration]) -> Plot:
    """Return memory against throughput of all configurations, with the front, and the budget to move."""
    best, budget_mib = findings.best, findings.budget_bytes / MIB
    answer = next(
        (place for place, one in enumerate(configurations) if best is not None and one.choice == best.choice), -1
    )
    lines = [
        {"id": place, "mib": round(one.mib, 2), "speed": round(one.speed, 1), "kind": one.kind}
        | {"failed": one.why.startswith("measured") and one.kind == REFUSED}
        | {"name": label(one.choice), "about": f"{_described(one.choice)}\n{_numbers(one)}\n{one.why}"}
        for place, one in enumerate(configurations)
    ]
    front = [
        {"mib": (row.peak_bytes or 0) / MIB, "speed": speed_of(row.choice, findings.rows)}
        for row in pareto_front(findings.rows)
    ]
    sizes = [one.mib for one in configurations]
    lowest, highest = min([budget_mib, *sizes]), max([budget_mib, *sizes])
    step = 10 ** (len(str(int(highest - lowest + 1))) - 3)  # a hundred steps or more
    first = step * math.floor(lowest / step)
    budget = alt.param(
        name="budget",
        value=round(budget_mib, 2),
        bind=alt.binding_range(min=round(first, 3), max=round(highest * 1.02, 2), step=step, name="budget, MiB"),
    )
    marked = alt.param(name="marked", value=[answer])
    kinds = [MEASURED, PREDICTED, REFUSED]
    colours = alt.Scale(domain=kinds, range=[colour(0), colour(4), GREY])
    shapes = alt.Scale(domain=kinds, range=["circle", "circle", "cross"])
    scale_x = alt.Scale(domain=[0, highest * 1.04], nice=False)
    base = alt.Chart().encode(
        x=alt.X("mib:Q", title="peak memory that the budget limits, MiB", scale=scale_x),
        y=alt.Y("speed:Q", title="tokens per second", scale=alt.Scale(zero=True)),
        **ABOUT,
    )
    points = base.encode(color=alt.Color("kind:N", scale=colours), shape=alt.Shape("kind:N", scale=shapes))
    over = alt.expr("datum.mib > budget ? 0.35 : 1")
    edge = alt.Chart(data([{}]))
    chart = layered(
        edge.mark_rect(color=WARNING, opacity=0.08).encode(
            x=alt.XDatum(alt.expr("budget"), type="quantitative"), x2=alt.value("width")
        ),
        edge.mark_rule(color=WARNING, strokeWidth=2).encode(x=alt.XDatum(alt.expr("budget"), type="quantitative")),
        points.transform_filter(alt.datum.kind != MEASURED).mark_point(
            filled=False, size=45, strokeWidth=1.5, opacity=over
        ),
        base.properties(data=data(front))
        .mark_line(interpolate="step-after", color=colour(2), strokeDash=[6, 3])
        .encode(tooltip=alt.value(None)),
        points.transform_filter(alt.datum.kind == MEASURED)
        .properties(name="measured")
        .mark_point(filled=True, size=80, opacity=over),
        base.transform_filter("indexof(marked, datum.id) >= 0")
        .properties(name="rings")
        .mark_point(shape="circle", size=320, strokeWidth=3, color=colour(2), filled=False, opacity=1),
        data=data(lines, "configurations"),
    ).add_params(budget, marked)
    what_if = "Nothing that was measured fits."
    if answer >= 0:
        what_if = f"At {budget_mib:,.1f} MiB: measured, {label(configurations[answer].choice)}: "
        what_if += f"{_numbers(configurations[answer])}. Move the budget to see the answer at another one."
    title = "memory against throughput of every configuration (ring: the answer, dashed: the measured front)"
    panel = Panel(title=title, chart=chart, height=420, what_if=what_if)
    return Plot(name="memory_against_throughput", title=title, panels=(panel,), is_wide=True)


def contributions_plot(findings: SearchFindings, configurations: Sequence[Configuration]) -> tuple[Plot, ...]:
    """Return waterfalls of memory and time from the naive configuration to the answer, one change at a time.

    Of the changes that are left, the one after which a step is fastest comes next; there is no plot if a configuration
    between the two has no known memory and speed.
    """
    rungs = _ladder(findings, configurations)
    if len(rungs) < 2:
        return ()
    panels = (
        _waterfall("peak memory from naive to the answer", [(name, one.mib, one.kind) for name, one in rungs], "MiB"),
        _waterfall(
            "time of 1,000 tokens from naive to the answer",
            [(name, 1e6 / one.speed, one.kind) for name, one in rungs],
            "ms",
        ),
    )
    return (
        Plot(name="contributions", title="what each setting of the answer contributes (~: predicted)", panels=panels),
    )


def left_plot(findings: SearchFindings, configurations: Sequence[Configuration]) -> tuple[Plot, ...]:
    """Return the distribution of the predicted speeds of what was not measured, beside the answer's."""
    best = findings.best
    if best is None or not any(one.kind == PREDICTED for one in configurations):
        return ()
    speed = speed_of(best.choice, findings.rows)
    lines = [
        {"percent": round(100 * (one.speed / speed - 1), 1), "kind": one.kind}
        for one in configurations
        if one.kind != MEASURED
    ]
    colours = alt.Scale(domain=[PREDICTED, REFUSED], range=[colour(4), GREY])
    chart = layered(
        alt.Chart(data(lines))
        .mark_bar()
        .encode(
            x=alt.X("percent:Q", bin=alt.Bin(maxbins=30), title="predicted speed against the answer's, %"),
            y=alt.Y("count():Q", title="configurations"),
            color=alt.Color("kind:N", scale=colours, legend=alt.Legend(columns=1, labelLimit=260)),
            tooltip=["kind:N", alt.Tooltip("count():Q", title="configurations")],
        ),
        alt.Chart(data([{"x": 0, "about": f"the answer: {speed:,.0f} tokens/s"}]))
        .mark_rule(color=colour(2), strokeWidth=3)
        .encode(x="x:Q", **ABOUT),
    )
    title = "what was not measured (green: the answer)"
    return (Plot(name="unmeasured", title=title, panels=(Panel(title=title, chart=chart),)),)


def _ladder(findings: SearchFindings, configurations: Sequence[Configuration]) -> list[tuple[str, Configuration]]:
    """Return the configurations from naive to the answer, each with the change that leads to it."""
    naive, best = findings.naive_trial, findings.best
    known = {tuple(sorted(one.choice.items(), key=str)): one for one in configurations}
    if naive is None or best is None:
        return []
    current = dict(naive.choice)
    rungs = [("naive", known.get(_key(current)))]
    while differing := [name for name, value in best.choice.items() if current.get(name) != value]:
        nexts = [(name, known.get(_key({**current, name: best.choice[name]}))) for name in differing]
        found = [(name, one) for name, one in nexts if one is not None]
        if not found:
            return []
        name, one = max(found, key=lambda pair: pair[1].speed)
        current[name] = best.choice[name]
        rungs.append((f"{heading(name)} {best.choice[name]}", one))
    return [(name, one) for name, one in rungs if one is not None] if rungs[0][1] is not None else []


def _key(choice: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(choice.items(), key=str))


def _waterfall(title: str, rungs: Sequence[tuple[str, float, str]], unit: str) -> Panel:
    """Return the first and the last value as bars, and the changes between them as steps, from top to bottom."""
    steps = [Bar(name=rungs[0][0], value=rungs[0][1], shade=GREY)]
    for (_, before, _), (name, after, kind) in itertools.pairwise(rungs):
        text = f"{'~ ' if kind != MEASURED else ''}{100 * (after / before - 1):+.0f} %"
        shade = colour(2) if after <= before else WARNING
        steps.append(Bar(name=f"+ {name}", start=before, value=after, shade=shade, text=text))
    steps.append(Bar(name="the answer", value=rungs[-1][1], shade=colour(0), text=short(rungs[-1][1])))
    return bars(title, steps, unit)


def _described(choice: Mapping[str, Any]) -> str:
    return "\n".join(f"{heading(name)} {value}" for name, value in choice.items())


def _numbers(one: Configuration) -> str:
    return f"{one.mib:,.1f} MiB, {one.speed:,.0f} tokens/s"
