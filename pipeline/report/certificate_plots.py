"""The certificate as plots: how likely it is that a faster configuration is left, and which one it would be."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from pipeline.config.settings import written
from pipeline.report.configurations import MEASURED, PREDICTED, REFUSED, Configuration
from pipeline.report.plot import ABOUT, GREY, WARNING, Panel, Plot, colour, data, layered, names_axis, names_height
from pipeline.searching.certificate import Certificate
from pipeline.searching.results import SearchFindings, heading

NUM_LIKELY = 12
"""Configurations of the plot of those that may be faster."""
NEGLIGIBLE = 0.005
"""Probability of being faster below which a configuration is not among them."""


def certificate_plots(findings: SearchFindings, configurations: Sequence[Configuration]) -> tuple[Plot, ...]:
    """Return the plots that the certificate allows; none without an answer."""
    best, certificate = findings.best, findings.certificate
    if best is None or certificate is None:
        return ()
    speed = findings.speed_of(best.choice)
    return (
        *_chance_plot(certificate),
        *(_likely_plot(configurations, best.choice, speed) if certificate.is_adequate else ()),
        *_left_plot(configurations, speed, findings.speed_text(speed)),
    )


def _chance_plot(certificate: Certificate) -> tuple[Plot, ...]:
    """Return the probability that a configuration is faster than the answer by more than x percent, for any x."""
    distributions = {
        "an unmeasured configuration": certificate.remaining_improvements,
        "any configuration": certificate.improvements,
    }
    lines = [
        {"which": which, "percent": round(100 * share, 2), "chance": 100 - percent}
        | {"about": f"{which}:\n{100 - percent} % probability of more than {100 * share:.1f} % less time"}
        for which, shares in distributions.items()
        for percent, share in enumerate(shares)
    ]
    if not lines or certificate.stated_bound is None:
        return ()
    bound = 100 * certificate.stated_bound
    mark = {"bound": bound, "about": certificate.claim}
    base = alt.Chart().encode(
        x=alt.X("percent:Q", title="time saved against the answer: at least, %", axis=alt.Axis(tickCount=8)),
        y=alt.Y("chance:Q", title="probability, %", scale=alt.Scale(domain=[0, 100])),
        color=alt.Color("which:N", scale=alt.Scale(domain=list(distributions), range=[colour(4), colour(0)])),
        **ABOUT,
    )
    at = alt.Chart(data([mark])).encode(**ABOUT)
    is_left = bound < 50 * max(map(max, distributions.values()))  # of the middle, so that the text has room beside it
    style: dict[str, Any] = {"align": "left", "dx": 5} if is_left else {"align": "right", "dx": -5}
    text = at.mark_text(color=WARNING, dy=12, **style)
    chart = layered(
        base.mark_line(strokeWidth=2.5, interpolate="step-before"),
        base.mark_point(filled=True, size=36, opacity=0.01),
        at.mark_rule(color=WARNING, strokeWidth=2).encode(x="bound:Q"),
        text.encode(x="bound:Q", y=alt.value(0), text=alt.value(f"{bound:.3g} %")),
        data=data(lines),
    )
    exceeded = 100 - 100 * certificate.confidence
    title = f"how likely something faster is left (red: the bound, exceeded with {exceeded:.0f} %)"
    return (Plot(name="certificate", title=title, panels=(Panel(title=title, chart=chart),)),)


def _likely_plot(configurations: Sequence[Configuration], answer: Mapping[str, Any], speed: float) -> tuple[Plot, ...]:
    """Return the predicted speeds, with their intervals, of what is most likely to be faster than the answer."""
    likely = sorted(
        (one for one in configurations if one.kind == PREDICTED and (one.chance or 0) > NEGLIGIBLE),
        key=lambda one: -(one.chance or 0),
    )[:NUM_LIKELY]
    if not likely:
        return ()
    lines = [
        {"place": place, "about": one.about, "chance": f"{100 * (one.chance or 0):.0f} %"}
        | {name: round(100 * (value / speed - 1), 1) for name, value in _interval(one).items()}
        for place, one in enumerate(likely)
    ]
    names = [_difference(one.choice, answer) for one in likely]
    base = alt.Chart().encode(y=alt.Y("place:O", axis=names_axis(names)), **ABOUT)
    scale = alt.Scale(range=[0, alt.expr("width - 48")], nice=False)  # right of it are the probabilities
    axis = alt.Axis(tickCount=6, titleAnchor="end")
    x = alt.X("low:Q", title="predicted speed against the answer's, %", scale=scale, axis=axis)
    at = base.encode(x=alt.X("middle:Q"))
    chart = layered(
        base.mark_rule(color=colour(4), strokeWidth=3, opacity=0.6).encode(x=x, x2="high:Q"),
        at.mark_point(filled=False, size=70, strokeWidth=2, color=colour(4)),
        base.mark_text(align="right", dx=-2).encode(x=alt.value("width"), text="chance:N"),
        alt.Chart(data([{"x": 0}])).mark_rule(color=colour(2), strokeWidth=2).encode(x="x:Q"),
        data=data(lines),
    )
    title = "configurations that may be faster than the answer (green), with their probability (lines: 95 % intervals)"
    panel = Panel(title=title, chart=chart, height=names_height(names))
    return (Plot(name="may_be_faster", title=title, panels=(panel,)),)


def _interval(one: Configuration) -> dict[str, float]:
    return {"low": one.slow, "middle": one.speed, "high": one.fast}


def _difference(choice: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    return ", ".join(f"{heading(name)} {written(value)}" for name, value in choice.items() if answer.get(name) != value)


def _left_plot(configurations: Sequence[Configuration], speed: float, written: str) -> tuple[Plot, ...]:
    """Return the distribution of the predicted speeds of what was not measured, beside the answer's."""
    if not any(one.kind == PREDICTED for one in configurations):
        return ()
    lines = [
        {"percent": round(100 * (one.speed / speed - 1), 1), "kind": one.kind}
        for one in configurations
        if one.kind != MEASURED and not one.failed
    ]
    colours = alt.Scale(domain=[PREDICTED, REFUSED], range=[colour(4), GREY])
    chart = layered(
        alt.Chart(data(lines))
        .mark_bar()
        .encode(
            x=alt.X("percent:Q", bin=alt.Bin(maxbins=30), title="predicted speed against the answer's, %"),
            y=alt.Y("count():Q", title="configurations", axis=alt.Axis(tickMinStep=1)),
            color=alt.Color("kind:N", scale=colours, legend=alt.Legend(columns=1, labelLimit=260)),
            tooltip=["kind:N", alt.Tooltip("count():Q", title="configurations")],
        ),
        alt.Chart(data([{"x": 0, "about": f"the answer: {written}"}]))
        .mark_rule(color=colour(2), strokeWidth=3)
        .encode(x="x:Q", **ABOUT),
    )
    title = "what was not measured (green: the answer)"
    return (Plot(name="unmeasured", title=title, panels=(Panel(title=title, chart=chart),)),)
