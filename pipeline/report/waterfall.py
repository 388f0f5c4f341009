"""A waterfall: two values as bars, and the changes that lead from the first to the second."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.changes import change_text
from pipeline.report.plot import GREY, WARNING, Bar, Panel, bars, colour, short


@dataclass(frozen=True)
class Rung:
    """A value after one more change."""

    name: str
    """The change, or what the first value is of."""
    value: float
    is_predicted: bool = False
    is_noise: bool = False
    """Whether the change to it is not beyond noise."""


def waterfall(title: str, rungs: Sequence[Rung], last: str, unit: str) -> Panel:
    """Return the first and the last value as bars, and the changes between them as steps, from top to bottom."""
    steps = [Bar(name=rungs[0].name, value=rungs[0].value, shade=colour(0))]
    for before, after in itertools.pairwise(rungs):
        percent = 100 * (after.value / before.value - 1)
        text = f"{'~ ' if after.is_predicted else ''}{change_text(percent, 0)}{', noise' if after.is_noise else ''}"
        shade = GREY if after.is_noise else colour(2) if after.value <= before.value else WARNING
        steps.append(Bar(name=f"+ {after.name}", start=before.value, value=after.value, shade=shade, text=text))
    steps.append(Bar(name=last, value=rungs[-1].value, shade=colour(0), text=short(rungs[-1].value)))
    return bars(title, steps, unit)
