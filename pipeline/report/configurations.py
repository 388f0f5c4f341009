"""The configurations of a search's space as points: measured, predicted or refused, and the answer at any budget."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import altair as alt

from pipeline.base.units import MIB
from pipeline.report.curves import ALL
from pipeline.report.plot import ABOUT, GREY, WARNING, Panel, Plot, colour, data, layered, short
from pipeline.searching.certificate import Unmeasured
from pipeline.searching.results import SearchFindings
from pipeline.searching.trials import Trial, front_of, label, one_per_configuration, pareto_front, refuted, speed_number
from pipeline.training.metrics import speed_in

MEASURED, PREDICTED, REFUSED = "measured", "predicted, not measured", "does not fit, or failed"
ANSWER, FASTEST = "the answer", "the fastest measured"
KINDS = (MEASURED, PREDICTED, REFUSED, ANSWER, FASTEST)
"""What the legend of the plane names: kinds of configurations, the ring and the line."""
DEVIATIONS = 1.96
"""Standard deviations on each side of the mean that hold 95 % of a normal distribution."""
NUM_SHOWN = 1500
"""Configurations of the chart, so that the page stays small."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A configuration with its memory and speed, as far as they are measured or predicted."""

    choice: Mapping[str, Any]
    mib: float
    speed: float
    """Tokens per second, of a command samples per second."""
    slow: float
    """Lower end of the interval that has the speed with a probability of 95 %; the speed where it was measured."""
    fast: float
    """Upper end of that interval."""
    kind: str
    """MEASURED, PREDICTED or REFUSED."""
    failed: bool = False
    """Whether it was measured, and did not complete or was refuted."""
    about: str
    """All that is known of it, in lines; the first is its label."""
    chance: float | None = None
    """Probability with which it is faster than the answer; None if it is not predicted."""


def configurations_of(findings: SearchFindings) -> list[Configuration]:
    """Return the configurations with a known memory and speed: those that were measured, then the others.

    Those are the fastest at every budget, then the fastest of all; together there are at most NUM_SHOWN.
    """
    tokens = [
        speed * row.metrics["seconds_per_step"]
        for row in findings.rows
        if "seconds_per_step" in row.metrics and (speed := speed_in(row.metrics))
    ]
    tokens_per_step = statistics.median(tokens) if tokens else 0.0
    refuted_choices = refuted(findings.runs)
    measured = [
        _measured(row, findings, tokens_per_step, refuted_choices) for row in one_per_configuration(findings.rows)
    ]
    unmeasured = [
        _unmeasured(one, one.predicted_peak_bytes, tokens_per_step / one.predicted_seconds_per_step, findings)
        for one in (findings.certificate.unmeasured if findings.certificate else ())
        if one.predicted_peak_bytes is not None and one.predicted_seconds_per_step
    ]
    front = {id(one) for one in front_of(unmeasured, lambda one: (one.mib, -one.speed))}
    unmeasured.sort(key=lambda one: (id(one) not in front, -one.speed))
    return [*filter(None, measured), *unmeasured][:NUM_SHOWN]


def _measured(
    row: Trial, findings: SearchFindings, tokens_per_step: float, refuted_choices: Sequence[Mapping[str, Any]]
) -> Configuration | None:
    """Return a measured configuration; one that did not complete has its predicted speed, None without it."""
    rows = findings.rows
    failed = row.tokens_per_second is None or row.choice in refuted_choices
    speed, seconds = findings.speed_of(row.choice), row.metrics.get("predicted_seconds_per_step")
    if not speed and seconds:
        speed = tokens_per_step / seconds
    if not speed or row.peak_bytes is None:
        return None
    own = [one for one in rows if one.choice == row.choice]
    mib, predicted_mib = row.peak_bytes / MIB, row.predicted_mib
    memory = _memory(row.peak_bytes, findings.budget_bytes)
    if row.tokens_per_second is None:  # of a run that ended early the peak is a lower bound
        memory, mib = f"at least {mib:,.1f} MiB", max(mib, predicted_mib or 0.0)
    lines = [
        memory + ("" if predicted_mib is None else f", predicted {predicted_mib:,.1f} MiB"),
        _time(findings, speed, tokens_per_step) + (f", predicted {short(seconds)} s" if seconds else ""),
        f"{'failed' if failed else 'measured'}: {', '.join(f'trial {one.number + 1} {one.outcome}' for one in own)}",
    ]
    return Configuration(
        choice=row.choice,
        mib=mib,
        speed=speed,
        slow=speed,
        fast=speed,
        kind=REFUSED if failed else MEASURED,
        failed=failed,
        about="\n".join([label(row.choice), *lines]),
    )


def _unmeasured(one: Unmeasured, peak_bytes: int, speed: float, findings: SearchFindings) -> Configuration:
    seconds, deviation = one.predicted_seconds_per_step or 0.0, one.predicted_deviation or 0.0
    factor = math.exp(DEVIATIONS * deviation)
    fit, chance = one.probability_of_fit, one.probability_of_improvement
    number = partial(speed_number, unit=findings.unit)
    why = f"{one.reason} ({one.cause})" if one.cause else one.reason
    interval = f" (95 %: {number(speed / factor)} to {number(speed * factor)})" if deviation else ""
    lines = [
        f"predicted {_memory(peak_bytes, findings.budget_bytes)}{'' if fit is None else f', fits: {100 * fit:.0f} %'}",
        f"predicted {findings.speed_text(speed)}{interval}, {short(seconds)} s a step",
        f"not measured: {why}{'' if chance is None else f'; faster than the answer: {100 * chance:.0f} %'}",
    ]
    return Configuration(
        choice=one.choice,
        mib=peak_bytes / MIB,
        speed=speed,
        slow=speed / factor,
        fast=speed * factor,
        kind=REFUSED if one.is_refused else PREDICTED,
        about="\n".join([label(one.choice), *lines]),
        chance=chance,
    )


def plane_plot(findings: SearchFindings, configurations: Sequence[Configuration]) -> Plot:
    """Return memory against throughput of all configurations, with the front, and the budget to move."""
    best, budget_mib = findings.best, findings.budget_bytes / MIB
    answer = next(
        (place for place, one in enumerate(configurations) if best is not None and one.choice == best.choice), -1
    )
    lines = [
        {"id": place, "mib": round(one.mib, 2), "speed": round(one.speed, 3), "kind": one.kind}
        | {"speed_text": findings.speed_text(one.speed)}
        | ({"slow": round(one.slow, 3), "fast": round(one.fast, 3)} if one.kind == PREDICTED else {})
        | {"failed": one.failed, "about": one.about}
        for place, one in enumerate(configurations)
    ]
    front = [
        {"mib": (row.peak_bytes or 0) / MIB, "speed": findings.speed_of(row.choice)}
        for row in pareto_front(findings.runs)
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
    menu = alt.binding_select(options=[ALL, *kinds], name="show")
    shown = alt.param(name="shown", value=ALL, bind=menu)
    is_shown = f"shown == '{ALL}' || shown == datum.kind"
    marks: dict[str, Any] = {
        "stroke": alt.Stroke("kind:N", scale=_by_kind(colour(0), colour(4), GREY, colour(2), colour(2))),
        "fill": alt.Fill("kind:N", scale=_by_kind(colour(0), *["transparent"] * 4)),
        "shape": alt.Shape("kind:N", scale=_by_kind("circle", "circle", "cross", "circle", "stroke")),
        "strokeDash": alt.StrokeDash("kind:N", scale=_by_kind([1, 0], [1, 0], [1, 0], [1, 0], [6, 3])),
    }
    # Sizes differ by factors: the small ones, among which the answer is, would be a strip on a linear axis.
    scale_x = alt.Scale(type="log", domain=[max(lowest, 1e-3) / 1.04, highest * 1.04], nice=False)
    axis_x = alt.Axis(tickCount=10, format=",~r")
    scale_y = alt.Scale(domain=[0, 1.1 * max((one.speed for one in configurations), default=1.0)], nice=True)
    base = alt.Chart().encode(
        x=alt.X("mib:Q", title="peak memory, MiB (logarithmic)", scale=scale_x, axis=axis_x),
        y=alt.Y("speed:Q", title=findings.unit.replace("/s", " per second"), scale=scale_y),
        **ABOUT,
    )
    points = base.transform_filter(is_shown).encode(**marks)
    over = alt.expr("datum.mib > budget ? 0.6 : 1")
    edge = alt.Chart(data([{}]))
    chart = layered(
        edge.mark_rect(color=WARNING, opacity=0.08).encode(
            x=alt.XDatum(alt.expr("budget"), type="quantitative"), x2=alt.value("width")
        ),
        edge.mark_rule(color=WARNING, strokeWidth=2).encode(x=alt.XDatum(alt.expr("budget"), type="quantitative")),
        base.transform_filter(f"datum.kind == '{PREDICTED}' && ({is_shown})")
        .mark_rule(clip=True, color=colour(4), strokeWidth=1, opacity=0.2)
        .encode(y="slow:Q", y2="fast:Q"),
        points.transform_filter(alt.datum.kind != MEASURED).mark_point(size=45, strokeWidth=1.5, opacity=over),
        base.properties(data=data(front))
        .mark_line(interpolate="step-after", color=colour(2), strokeDash=[6, 3])
        .encode(tooltip=alt.value(None)),
        points.transform_filter(alt.datum.kind == MEASURED)
        .properties(name="measured")
        .mark_point(size=80, opacity=over),
        base.transform_filter("indexof(marked, datum.id) >= 0")
        .transform_calculate(kind=f"'{ANSWER}'")
        .properties(name="rings")
        .mark_point(size=320, strokeWidth=3, opacity=1)
        .encode(**marks),
        data=data(lines, "configurations"),
    ).add_params(budget, marked, shown)
    what_if = "Nothing that was measured fits."
    if answer >= 0:
        one = configurations[answer]
        what_if = (
            f"At {budget_mib:,.1f} MiB: measured, {label(one.choice)}: {one.mib:,.1f} MiB, "
            f"{findings.speed_text(one.speed)}. Move the budget to see the answer at another one."
        )
    title = (
        f"speed and memory of {len(configurations):,} of {findings.num_configurations:,} configurations (thin lines: "
        "95 % intervals; red: over the budget)"
    )
    panel = Panel(title=title, chart=chart, height=360, what_if=what_if)
    return panel.alone("memory_against_throughput", is_wide=True)


def _by_kind(*values: Any) -> alt.Scale:
    return alt.Scale(domain=list(KINDS), range=list(values))


def _memory(peak_bytes: int, budget_bytes: int) -> str:
    left_mib = (budget_bytes - peak_bytes) / MIB
    return f"{peak_bytes / MIB:,.1f} MiB, {abs(left_mib):,.1f} MiB {'of headroom' if left_mib >= 0 else 'too many'}"


def _time(findings: SearchFindings, speed: float, tokens_per_step: float) -> str:
    return findings.speed_text(speed) + (f", {short(tokens_per_step / speed)} s a step" if tokens_per_step else "")
