"""Waterfall: the change of memory and time by each setting, from the baseline to all of them."""

import itertools
from collections.abc import Sequence

from pipeline.config.given import written
from pipeline.report.changes import Rung, waterfall
from pipeline.report.page import Section
from pipeline.report.plot import Panel, Plot
from pipeline.report.sections import LADDER
from pipeline.training.metrics import Row
from pipeline.training.time_differences import MEASURED, difference

DERIVED = {"accumulation_steps", "effective_batch_size", "user_code"}
"""Settings that follow from others, which the waterfall names."""
TOGETHER = "together"
"""Name of the last bar."""
FEWEST = 3
"""Rungs of the shortest ladder: the baseline and two more."""


def section(rows: Sequence[Row]) -> Section:
    """Return the plot `waterfall`: memory and time, changed by one setting after another, in the ladder of `rows`.

    That is the comparison named LADDER, if some of its variants each keep what the one before changed, and change more.
    In any other, variants that happen to do so would hide those between them.
    """
    rungs = _rungs([row for row in rows if row.comparison == LADDER])
    panels = _panels(rungs) if len(rungs) >= FEWEST else []
    plot = Plot(
        name="waterfall",
        title="what each setting adds, one after another (green: less, red: more, grey: no difference beyond noise)",
        panels=tuple(panels),
    )
    return Section(title=plot.title, plots=(plot,) if panels else ())


def _panels(rungs: Sequence[Row]) -> list[Panel]:
    names = _named(rungs)
    changes = [None, *(difference(after, before) for before, after in itertools.pairwise(rungs))]
    are_noise = [change is not None and not change.is_beyond_noise for change in changes]
    memory = [Rung(name, row.metrics["peak_allocated_mib"]) for name, row in zip(names, rungs, strict=True)]
    time = [
        Rung(name, row.metrics["seconds_per_step"], is_noise=is_noise)
        for name, row, is_noise in zip(names, rungs, are_noise, strict=True)
    ]
    return [
        waterfall("peak memory", memory, TOGETHER, "MiB"),
        waterfall("time per optimizer step", time, TOGETHER, "s/step"),
    ]


def _rungs(rows: Sequence[Row]) -> list[Row]:
    """Return the baseline of a comparison, then variants that each add to the changes of the one before."""
    rungs = [row for row in rows if row.is_baseline and set(row.metrics) >= MEASURED][:1]
    for row in rows if rungs else ():
        if set(row.metrics) >= MEASURED and _changes(rungs[-1], rungs[0]).items() < _changes(row, rungs[0]).items():
            rungs.append(row)
    return rungs


def _changes(row: Row, baseline: Row) -> dict[str, str]:
    """Return the settings that differ from the baseline's, with their values as text."""
    names = set(row.params) - DERIVED
    return {name: written(row.params[name]) for name in names if row.params[name] != baseline.params.get(name)}


def _named(rungs: Sequence[Row]) -> list[str]:
    """Return the baseline's name, then what each variant changes besides the changes of the one before."""
    names = [rungs[0].name]
    for before, after in itertools.pairwise(rungs):
        added = _changes(after, rungs[0]).items() - _changes(before, rungs[0]).items()
        names.append(" + ".join(f"{setting} {value}" for setting, value in sorted(added)))
    return names
