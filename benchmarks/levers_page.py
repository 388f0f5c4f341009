"""The page of benchmarks/levers.py: a table for each comparison, and its waterfall."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.base.units import MIB
from pipeline.config.variants import EntryPoint
from pipeline.report.plot import Plot, bars
from pipeline.report.sections import make_sections
from pipeline.training.metrics import Row

HOW_TO_READ = """\
Each lever is compared with the plain step of the same repeat. `time` is its median seconds of a step over the plain
step's, less 1: the median over the repeats, and the least and greatest. `loss difference` is the largest of any
optimizer step, relative to the plain step's loss. What cannot be predicted has no prediction. A lever that this machine
cannot run stands below its table, with the reason."""
HEADER = "| variant | predicted MiB | peak MiB | prediction error % | saved % | s/step | time % | loss difference % |"
Run = Mapping[str, str]
"""A line of the .csv."""


@dataclass(frozen=True)
class Measured:
    """The medians of a variant's runs, and their comparison with the plain runs of the same repeats."""

    predicted_mib: float | None
    peak_mib: float
    seconds_per_step: float
    saved_percent: float
    time_percent: tuple[float, float, float]
    """Median, least and greatest."""
    loss_percent: float

    @property
    def cells(self) -> list[str]:
        """The cells of its line in the table."""
        middle, least, greatest = self.time_percent
        is_predicted = self.predicted_mib is not None
        return [
            f"{self.predicted_mib:,.1f}" if is_predicted else "",
            f"{self.peak_mib:,.1f}",
            f"{100 * (self.predicted_mib / self.peak_mib - 1):+.3f}" if self.predicted_mib is not None else "",
            f"{self.saved_percent:+.1f}",
            f"{self.seconds_per_step:.4f}",
            f"{middle:+.1f} ({least:+.1f} to {greatest:+.1f})",
            f"{self.loss_percent:.2g}",
        ]


def names_in_journal(entry: EntryPoint) -> dict[tuple[str, str], str]:
    """Return, for each comparison and variant, the name of the first variant with the same settings."""
    names: dict[tuple[str, str], str] = {}
    first: dict[str, str] = {}
    for variant in entry.variants:
        name = f"{variant.comparison}/{variant.name}"
        names[variant.comparison, variant.name] = first.setdefault(variant.experiment.to_yaml(), name)
    return names


def page(entry: EntryPoint, runs: Sequence[Run], about: Mapping[str, str], plot: str, num_left: int) -> str:
    """Return the page as Markdown; `plot` is the file name of the waterfall."""
    repeats = len({run["repeat"] for run in runs})
    facts = [f"| {name} | {value} |" for name, value in about.items()]
    parts = [
        f"# {entry.question}",
        f"Written by `python benchmarks/levers.py`: {len(runs)} runs, {repeats} repeats."
        + (f" {num_left} runs are left: the same command continues." if num_left else ""),
        HOW_TO_READ,
        "\n".join(["| what | value |", "|---|---|", *facts]),
        f"![What each lever adds]({plot})",
    ]
    for comparison in dict.fromkeys(variant.comparison for variant in entry.variants):
        parts += [f"## {comparison}", _table(entry, comparison, runs), *_notes(entry, comparison, runs)]
    return "\n\n".join(parts) + "\n"


def waterfall(entry: EntryPoint, runs: Sequence[Run]) -> bytes:
    """Return a PNG of the waterfalls of memory and of time."""
    rows = []
    for variant in entry.variants:
        own = measured(entry, variant.comparison, runs).get(variant.name)
        metrics = {"peak_allocated_mib": own.peak_mib, "seconds_per_step": own.seconds_per_step} if own else {}
        row = Row(
            comparison=variant.comparison,
            name=variant.name,
            is_baseline=variant.is_baseline,
            params=variant.experiment.params(),
            result=None,
            skipped=variant.skipped,
            metrics=metrics,
        )
        rows.append(row)
    sections = make_sections(("waterfall",), rows)
    empty = Plot(name="waterfall", title="too few runs", panels=(bars("too few runs", (), "MiB"),))
    return next((plot for section in sections for plot in section.plots), empty).to_png()


def measured(entry: EntryPoint, comparison: str, runs: Sequence[Run]) -> dict[str, Measured]:
    """Return what was measured of each variant of a comparison that completed beside its baseline, by its name."""
    names = names_in_journal(entry)
    ended: dict[str, dict[str, Run]] = {}
    for run in runs:
        if run["outcome"] == "ok" and run["seconds_per_step"]:
            ended.setdefault(run["variant"], {})[run["repeat"]] = run
    variants = [variant for variant in entry.variants if variant.comparison == comparison]
    [baseline] = [variant.name for variant in variants if variant.is_baseline]
    plain = ended.get(names[comparison, baseline], {})
    found = {}
    for variant in variants:
        own = ended.get(names[comparison, variant.name], {})
        pairs = [(run, plain[repeat]) for repeat, run in own.items() if repeat in plain]
        if pairs:
            found[variant.name] = _compared(pairs)
    return found


def _compared(pairs: Sequence[tuple[Run, Run]]) -> Measured:
    """Return the comparison of runs with the plain ones of the same repeats."""
    peak, plain_peak = (_median(side, "peak_allocated_bytes") for side in zip(*pairs, strict=True))
    times = [100 * (float(one["seconds_per_step"]) / float(other["seconds_per_step"]) - 1) for one, other in pairs]
    predicted = pairs[0][0]["predicted_allocated_bytes"]
    return Measured(
        predicted_mib=int(predicted) / MIB if predicted else None,
        peak_mib=peak / MIB,
        seconds_per_step=_median([one for one, _ in pairs], "seconds_per_step"),
        saved_percent=100 * (1 - peak / plain_peak),
        time_percent=(statistics.median(times), min(times), max(times)),
        loss_percent=max(_loss_percent(one, other) for one, other in pairs),
    )


def _median(runs: Sequence[Run], column: str) -> float:
    return statistics.median(float(run[column]) for run in runs)


def _loss_percent(run: Run, plain: Run) -> float:
    losses, others = ([float(loss) for loss in each["losses"].split()] for each in (run, plain))
    return max(100 * abs(loss / other - 1) for loss, other in zip(losses, others, strict=True))


def _table(entry: EntryPoint, comparison: str, runs: Sequence[Run]) -> str:
    lines = [HEADER, "|---" + "|---:" * (HEADER.count("|") - 2) + "|"]
    lines += [f"| {name} | {' | '.join(one.cells)} |" for name, one in measured(entry, comparison, runs).items()]
    return "\n".join(lines)


def _notes(entry: EntryPoint, comparison: str, runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each variant that was skipped or failed."""
    variants = [variant for variant in entry.variants if variant.comparison == comparison]
    notes = [f"- {variant.name}: skipped, {variant.skipped}" for variant in variants if variant.skipped]
    names = names_in_journal(entry)
    for variant in variants:
        name = names[comparison, variant.name]
        failed = sorted({run["outcome"] for run in runs if run["variant"] == name} - {"ok"})
        notes += [f"- {variant.name}: {', '.join(failed)}"] if failed else []
    return ["\n".join(notes)] if notes else []
