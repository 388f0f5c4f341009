"""The results of the replays as a Markdown page: a line for each budget and sampler."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from replay.search import OPTUNAS, Replayed
from replay.table import Entry, conditions, rows_of, slownesses


def summary(results: Sequence[Replayed]) -> Iterator[dict[str, Any]]:
    """Yield a line for each budget and sampler."""
    for budget, sampler in dict.fromkeys((result.budget_bytes, result.sampler) for result in results):
        rows = [one for one in results if (one.budget_bytes, one.sampler) == (budget, sampler)]
        found = [one for one in rows if one.trials_to_near is not None]
        proven = [one.certificate_holds for one in rows if one.certificate_holds is not None]
        yield {
            "budget MiB": f"{budget / 2**20:.1f}",
            "sampler": sampler,
            "searches": len(rows),
            "found": f"{100 * len(found) / len(rows):.0f} %",
            "trials to 2 %": _to_near([one.trials_to_near for one in rows], "{:.0f}"),
            "seconds to 2 %": _to_near([one.seconds_to_near for one in rows], "{:.1f}"),
            "trials in all": _spread([one.trials for one in rows], "{:.0f}") if sampler not in OPTUNAS else "",
            "over budget": f"{statistics.fmean(one.over_budget for one in rows):.2f}",
            "distance": "" if sampler in OPTUNAS else f"{100 * statistics.median(o.distance for o in rows):.1f} %",
            "bound": _spread([100 * one.bound for one in rows if one.bound is not None], "{:.1f} %"),
            "bound true": f"{100 * statistics.fmean(proven):.1f} % of {len(proven)}" if proven else "",
        }


def _spread(values: Sequence[float], form: str) -> str:
    """Return median and range."""
    if not values:
        return ""
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} to {form.format(max(values))})"


def _to_near(values: Sequence[float | None], form: str) -> str:
    """Return the median, in which what was never found is the greatest, and the range of what was found."""
    found = [value for value in values if value is not None]
    if not found:
        return ""
    median = statistics.median(math.inf if value is None else value for value in values)
    text = form.format(median) if math.isfinite(median) else "never"
    return f"{text} ({form.format(min(found))} to {form.format(max(found))})"


def page(lines: Sequence[Mapping[str, Any]], file: Path, entries: Sequence[Entry], command: str) -> str:
    """Return the table as Markdown."""
    about = json.loads(file.with_suffix(".json").read_text())
    slow = slownesses(rows_of(file), conditions(file)["dimensions"])
    apart = [abs(math.log(entry.runs[0].seconds / entry.runs[-1].seconds)) for entry in entries]
    off = max(abs((entry.candidate.predicted_bytes or 0) / entry.peak_bytes - 1) for entry in entries)
    names = list(lines[0])
    return "\n".join(
        [
            f"# Samplers replayed on {file.name}",
            "",
            f"Written by `{command}`. The table holds {len(entries)} configurations, each measured "
            f"{min(len(entry.runs) for entry in entries)} times in random order{_contenders(entries)}; "
            f"two runs of one differ by {100 * statistics.median(apart):.1f} % in the median; "
            f"predicted peaks are off by at most {100 * off:.3f} %. "
            f"Times are divided by how slow the machine was just then: the median of the seven runs "
            f"around, each over the fastest of its configuration (at most {max(slow):.2f}, above 1.05 in "
            f"{sum(s > 1.05 for s in slow)} of {len(slow)} runs).",
            "",
            "| what | value |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in about.items()),
            "",
            "A search has found the best once its incumbent is within 2 % of the best configuration that fits; "
            "trials that did not fit or were measured again count. Median, and range in brackets, over the seeds;"
            " a search that never found it counts as the slowest in the median, and not in the range. Optuna's "
            "samplers are followed until they have found it (or for `--other_trials`) and never measure a "
            "configuration twice; the others end by themselves, predictive also where its time model is not "
            "adequate: then it states no bound. A run that is measured again is another run of the table, as long"
            " as there is one, so what the search knows of its answer in the end is what the table knows. A bound"
            " is true where the best configuration lies within it; it is stated after the answer was measured "
            "once more.",
            "",
            f"| {' | '.join(names)} |",
            f"|{'---|' * len(names)}",
            *(f"| {' | '.join(str(value) for value in line.values())} |" for line in lines),
            "",
        ]
    )


def _contenders(entries: Sequence[Entry]) -> str:
    """Return how many configurations were measured more often, and how often, as part of a sentence."""
    numbers = [len(entry.runs) for entry in entries]
    most = max(numbers)
    return (
        "" if most == min(numbers) else f", and {numbers.count(most)} that may be the fastest at a budget {most} times"
    )
