"""What each setting of a search's answer contributes: from the naive configuration to the answer, change by change."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report.configurations import MEASURED, Configuration
from pipeline.report.plot import GREY, WARNING, Bar, Panel, Plot, bars, colour, short
from pipeline.searching.results import SearchFindings, heading


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
        text = f"{'~ ' if kind != MEASURED else ''}{round(100 * (after / before - 1)):+} %"
        shade = colour(2) if after <= before else WARNING
        steps.append(Bar(name=f"+ {name}", start=before, value=after, shade=shade, text=text))
    steps.append(Bar(name="the answer", value=rungs[-1][1], shade=colour(0), text=short(rungs[-1][1])))
    return bars(title, steps, unit)
