"""Changes against a baseline: as text, with factors where they are large, and one after another as a waterfall."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.plot import GREY, WARNING, Bar, Panel, bars, colour, short
from pipeline.training.time_differences import TimeDifference

FACTOR_FROM = 200.0
"""Percent above which a change is written as a factor."""
NOISE = "no difference beyond noise"
INTERVAL = "time from to"
"""Heading of the column with the interval of the change in time."""


def change_text(percent: float, digits: int | None = None) -> str:
    """Return a change as text, with so many decimals, or in three digits: +12.3 %, x 18."""
    if percent > FACTOR_FROM:
        return f"x {short(1 + percent / 100)}"
    return f"{round(percent, 2) + 0.0:+.3g} %" if digits is None else f"{percent:+.{digits}f} %"  # -0.0 + 0.0 is 0.0


def change_in_table(percent: float) -> str:
    """Return a change for a column of percentages, where it has no sign of percent: +12.3, x 18."""
    return change_text(percent, 1).removesuffix(" %")


def interval_text(change: TimeDifference) -> str:
    """Return the interval of a change as text: +10 to +14 %, x 16 to x 20."""
    if change.high > FACTOR_FROM:
        return f"x {short(1 + change.low / 100)} to x {short(1 + change.high / 100)}"
    near, far = sorted((abs(change.low), abs(change.high)))
    digits = 0 if far >= 10 and near >= 0.5 else 1
    return f"{change.low:+.{digits}f} to {change.high:+.{digits}f} %"


def more_or_less(percent: float, what: str) -> str:
    """Return a change in whole percents as words: 12 % less memory, 18 times the memory, as much memory."""
    if percent > FACTOR_FROM:
        return f"{short(1 + percent / 100)} times the {what}"
    whole = round(percent)
    return f"{abs(whole)} % {'less' if whole < 0 else 'more'} {what}" if whole else f"as much {what}"


def time_in_words(change: TimeDifference) -> str:
    """Return a change of the time per sample as words, with its interval."""
    if not change.is_beyond_noise:
        return f"no difference in time beyond noise ({interval_text(change)})"
    return f"{more_or_less(change.percent, 'time per sample')} ({interval_text(change)})"


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
