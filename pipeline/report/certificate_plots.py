"""The certificate as a plot: the configurations that may be faster than the answer."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from pipeline.config.settings import written
from pipeline.report.configurations import PREDICTED, Configuration
from pipeline.report.plot import ABOUT, Panel, Plot, colour, data, layered, names_axis, names_height
from pipeline.searching.results import SearchFindings, heading

NUM_LIKELY = 12
"""Configurations of the plot of those that may be faster."""
NEGLIGIBLE = 0.005
"""Probability of being faster below which a configuration is not among them."""


def certificate_plots(findings: SearchFindings, configurations: Sequence[Configuration]) -> tuple[Plot, ...]:
    """Return the predicted speeds, with their intervals, of what is most likely to be faster than the answer.

    There is no plot without an answer, without an adequate time model, or if nothing is likely to be faster.
    """
    best, certificate = findings.best, findings.certificate
    if best is None or certificate is None or not certificate.is_adequate:
        return ()
    answer, speed = best.choice, findings.speed_of(best.choice)
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
