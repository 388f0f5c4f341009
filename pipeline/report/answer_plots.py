"""The plots of a search's answer: what its settings contribute, what may be faster, and how it trained again."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from pipeline.base.units import MIB
from pipeline.config.given import written
from pipeline.config.space import key_of
from pipeline.report.changes import Rung, waterfall
from pipeline.report.configurations import ANSWER, MEASURED, PREDICTED, Configuration
from pipeline.report.curves import curves
from pipeline.report.plot import ABOUT, Panel, Plot, colour, data, layered, names_axis, names_height
from pipeline.searching.results import SearchFindings, Verification
from pipeline.searching.trials import heading

NUM_LIKELY = 12
"""Configurations of the plot of those that may be faster."""
NEGLIGIBLE = 0.005
"""Probability of being faster below which a configuration is not among them."""


def contributions_plot(findings: SearchFindings, configurations: Sequence[Configuration]) -> tuple[Plot, ...]:
    """Return waterfalls of memory and time from the baseline to the answer, one change at a time.

    Of the changes that are left, the one after which a step is fastest comes next; there is no plot if a configuration
    between the two has no known memory and speed.
    """
    rungs = _ladder(findings, configurations)
    if len(rungs) < 2:
        return ()
    memory = [Rung(name, one.mib, one.kind != MEASURED) for name, one in rungs]
    time = [Rung(name, 1e6 / one.speed, one.kind != MEASURED) for name, one in rungs]
    panels = (
        waterfall("peak memory from the baseline to the answer", memory, ANSWER, "MiB"),
        waterfall("time of 1,000 tokens from the baseline to the answer", time, ANSWER, "ms"),
    )
    return (
        Plot(name="contributions", title="what each setting of the answer contributes (~: predicted)", panels=panels),
    )


def _ladder(findings: SearchFindings, configurations: Sequence[Configuration]) -> list[tuple[str, Configuration]]:
    """Return the configurations from the baseline to the answer, each with the change that leads to it."""
    baseline, best = findings.baseline_trial, findings.best
    known = {key_of(one.choice): one for one in configurations if not one.failed}
    if baseline is None or best is None:
        return []
    current = dict(baseline.choice)
    rungs = [("baseline", known.get(key_of(current)))]
    while differing := [name for name, value in best.choice.items() if current.get(name) != value]:
        nexts = [(name, known.get(key_of({**current, name: best.choice[name]}))) for name in differing]
        found = [(name, one) for name, one in nexts if one is not None]
        if not found:
            return []
        name, one = max(found, key=lambda pair: pair[1].speed)
        current[name] = best.choice[name]
        rungs.append((f"{heading(name)} {written(best.choice[name])}", one))
    return [(name, one) for name, one in rungs if one is not None] if rungs[0][1] is not None else []


def certificate_plots(findings: SearchFindings, configurations: Sequence[Configuration]) -> tuple[Plot, ...]:
    """Return the predicted speeds, with their intervals, of what is most likely to be faster than the answer."""
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
        | {
            name: round(100 * (value / speed - 1), 1)
            for name, value in {"low": one.slow, "middle": one.speed, "high": one.fast}.items()
        }
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
    return (Panel(title=title, chart=chart, height=names_height(names)).alone("may_be_faster"),)


def _difference(choice: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    return ", ".join(f"{heading(name)} {written(value)}" for name, value in choice.items() if answer.get(name) != value)


def losses_plots(verification: Verification) -> tuple[Plot, ...]:
    """Return the losses of both over the steps; none if they were not compared."""
    if verification.plain is None or verification.max_loss_difference is None:
        return ()
    runs = {"plain": verification.plain_losses, "answer": verification.losses}
    series = {name: list(enumerate(losses, 1)) for name, losses in runs.items()}
    panel = curves("losses of the answer and of the plain configuration", series, "loss")
    return (panel.alone("verified_losses"),)


def reserved_plots(verification: Verification, budget_bytes: int) -> tuple[Plot, ...]:
    """Return the reserved memory over the steps, beside its predicted peak and the budget; none of a CPU."""
    if not verification.reserved_bytes:
        return ()
    held_mib = [num_bytes / MIB for num_bytes in verification.reserved_bytes]
    limits_mib = {
        "budget": budget_bytes / MIB,
        "predicted peak": verification.answer.metrics.get("predicted_peak_reserved_mib"),
    }
    series = {"reserved": list(enumerate(held_mib, 1))}
    for name, limit_mib in limits_mib.items():
        if limit_mib is not None:
            series[f"{name} {limit_mib:,.0f} MiB"] = [(1, limit_mib), (len(held_mib), limit_mib)]
    panel = curves("reserved memory over the steps of the answer", series, "MiB", scale=alt.Scale(zero=True))
    return (panel.alone("reserved_over_time"),)
