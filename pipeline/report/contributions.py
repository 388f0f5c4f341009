"""What each setting of a search's answer contributes: from the baseline to the answer, change by change."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config.settings import written
from pipeline.report.configurations import MEASURED, Configuration
from pipeline.report.plot import Plot
from pipeline.report.waterfall import Rung, waterfall
from pipeline.searching.results import SearchFindings, heading

ANSWER = "the answer"
"""Name of the last bar."""


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
    known = {_key(one.choice): one for one in configurations if not one.failed}
    if baseline is None or best is None:
        return []
    current = dict(baseline.choice)
    rungs = [("baseline", known.get(_key(current)))]
    while differing := [name for name, value in best.choice.items() if current.get(name) != value]:
        nexts = [(name, known.get(_key({**current, name: best.choice[name]}))) for name in differing]
        found = [(name, one) for name, one in nexts if one is not None]
        if not found:
            return []
        name, one = max(found, key=lambda pair: pair[1].speed)
        current[name] = best.choice[name]
        rungs.append((f"{heading(name)} {written(best.choice[name])}", one))
    return [(name, one) for name, one in rungs if one is not None] if rungs[0][1] is not None else []


def _key(choice: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(choice.items(), key=str))
