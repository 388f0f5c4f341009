"""The report of comparisons: the answer, what each variant saves and costs, curves and bars, and tables last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.base.by_key import grouped
from pipeline.base.results import Outcome
from pipeline.data._support.truncation import LengthBin, Truncation
from pipeline.report.answers import answer, commands, headlines, outcome_of, readable, short_answer
from pipeline.report.changes import INTERVAL, change_in_table, interval_text
from pipeline.report.course import phases_plot
from pipeline.report.lengths import lengths_section
from pipeline.report.losses import losses_panel, seconds_panel
from pipeline.report.other_trainings import other_trainings
from pipeline.report.page import Report, Section
from pipeline.report.plot import Plot
from pipeline.report.sections import LADDER, make_sections
from pipeline.report.table import Form, Table, file_alone
from pipeline.report.tradeoff import TITLE, tradeoff_plots
from pipeline.training.metrics import Row, common_settings
from pipeline.training.time_differences import time_change
from pipeline.training.timing import counting_timings

COLUMNS: Mapping[str, tuple[str, Form]] = {
    "peak_allocated_mib": ("peak MiB", "{:,.1f}"),
    "peak_reserved_mib": ("reserved MiB", "{:,.1f}"),
    "prediction_error_percent": ("prediction error %", "{:+.2f}"),
    "memory_saving_percent": ("memory %", "{:+.1f}"),
    "seconds_per_step": ("s/step", "{:.4f}"),
    "time_overhead_percent": ("time %", change_in_table),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "padding_percent": ("padding %", "{:.1f}"),
    "final_loss": ("final loss", "{:.4f}"),
    "eval_loss": ("held-out loss", "{:.4f}"),
    "max_loss_difference": ("loss diff.", "{:.2g}"),
}
"""Metrics of the table: heading and format."""
EXPENDABLE = (
    "prediction_error_percent",
    "padding_percent",
    "final_loss",
    "peak_reserved_mib",
    "tokens_per_second",
    "eval_loss",
    "seconds_per_step",
)
"""Metrics that a narrow terminal leaves out, the first one first."""
WATERFALL = "waterfall"
"""The section that shows the steps of a ladder."""
MOST_SHOWN = 24
"""Variants of one comparison that charts show."""


@dataclass(frozen=True, kw_only=True)
class ComparisonFindings:
    """The findings of a comparison, from which its report is made."""

    entry: str
    question: str
    rows: tuple[Row, ...]
    environment: Mapping[str, str]
    sections: tuple[str, ...] = ()
    """Names of files in report/sections/ that add to the report."""
    truncations: tuple[Truncation, ...] = ()
    """What cutting the corpus's documents at several lengths loses, and the first run would then need."""
    lengths: tuple[LengthBin, ...] = ()
    """The histogram of the lengths of the corpus's documents."""
    interrupted: str | None = None
    """How far the job came, such as 3 of 25 variants, if it was interrupted."""
    run_ids: tuple[str, ...] = ()
    """The MLflow runs that are compared, if they are of earlier jobs."""

    @property
    def any_completed(self) -> bool:
        """Whether one of the runs completed."""
        return any(row.completed for row in self.rows)


def comparison_report(findings: ComparisonFindings) -> Report:
    """Return the report."""
    by_comparison = grouped((row.comparison, row) for row in findings.rows)
    steps = make_sections([name for name in findings.sections if name == WATERFALL], findings.rows)
    sections = [
        *_first(by_comparison, steps),
        _comparisons(findings.entry, by_comparison),
        *filter(None, (other_trainings(name, rows) for name, rows in by_comparison.items())),
        *make_sections([name for name in findings.sections if name != WATERFALL], findings.rows),
        *lengths_section(findings.rows[0], findings.truncations, findings.lengths),
    ]
    tables = tuple(table for section in sections for table in section.tables)
    drawn = [replace(section, tables=()) for section in sections if section.plots or section.notes]
    if len(by_comparison) == 1:
        answers = [answer(findings.rows)]
    else:
        texts = [f"{readable(name)}: {short_answer(rows)}" for name, rows in by_comparison.items()]
        answers = [text[0].upper() + text[1:] for text in texts]
    return Report(
        entry=findings.entry,
        question=findings.question,
        answer=" ".join(answers),
        headlines=headlines(by_comparison),
        commands=commands(by_comparison),
        sections=(*drawn, Section(title="tables", tables=tables)),
        environment=findings.environment,
        settings=common_settings([row.params for row in findings.rows]),
    )


def _first(comparisons: Mapping[str, Sequence[Row]], steps: Sequence[Section]) -> list[Section]:
    """Return the charts that answer the question: each variant against its baseline, and the steps of a ladder.

    Of a ladder beside other comparisons the steps come first, and its variants are not shown twice.
    """
    is_beside = bool(steps) and len(comparisons) > 1
    pairs = tradeoff_plots(
        {name: shown(rows) for name, rows in comparisons.items() if not (is_beside and name == LADDER)}
    )
    paired = [Section(title=TITLE, plots=pairs)] if pairs else []
    return [*steps, *paired] if is_beside else [*paired, *steps]


def shown(rows: Sequence[Row]) -> list[Row]:
    """Return the variants that charts show: the baseline, and of very many the fastest, in their order."""
    ranked = sorted(rows, key=lambda row: (not row.is_baseline, -row.metrics.get("samples_per_second", 0.0)))
    kept = {id(row) for row in ranked[:MOST_SHOWN]}
    return [row for row in rows if id(row) in kept]


def _comparisons(entry: str, comparisons: Mapping[str, Sequence[Row]]) -> Section:
    """Return the losses of all comparisons, their tables and what is to be said of their runs."""
    tables, plots, sentences = list[Table](), list[Plot](), list[str]()
    for name, rows in comparisons.items():
        of = readable(name) if len(comparisons) > 1 else ""
        tables.append(overview_table(": ".join(filter(None, (entry, of))), rows))
        plots += overview_plots(shown(rows), of)
        if hidden := len(rows) - len(shown(rows)):
            sentences.append(f"Charts show the baseline and the fastest: {hidden} more runs are in the table.")
        sentences += (*notes(rows), *_slowed_note(rows))
    tables.append(comparison_table([row for rows in comparisons.values() for row in rows]))
    return Section(title=f"{entry}: the runs", tables=tuple(tables), notes=tuple(sentences), plots=tuple(plots))


def overview_plots(rows: Sequence[Row], of: str = "") -> tuple[Plot, ...]:
    """Return the losses of the comparison `of`; of a single run its memory by phase, and losses and times of steps."""
    if not any(row.steps for row in rows):
        return ()
    name, losses = rows[0].comparison, losses_panel(rows, of)
    if len(rows) > 1:
        return (losses.alone(name),)
    over_time = Plot(name=name, title=f"steps of {rows[0].name}", panels=(losses, seconds_panel(rows)))
    return (*phases_plot(rows[0], is_wide=True), over_time)


def comparison_table(rows: Sequence[Row]) -> Table:
    """Return a file with a row for each variant: its comparison, outcome, settings and metrics."""
    lines = [
        {
            "comparison": row.comparison,
            "variant": row.name,
            "baseline": row.is_baseline,
            "outcome": outcome_of(row),
            "detail": row.skipped or (row.result.detail if row.result else None),
            **row.params,
            **row.metrics,
        }
        for row in rows
    ]
    return file_alone("comparison", "every setting and metric", lines)


def overview_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the table of one comparison; a star marks the baseline."""
    shown = {name: form for name, form in COLUMNS.items() if any(name in row.metrics for row in rows)}
    outcomes = [outcome_of(row) for row in rows]
    lines = [
        {
            "variant": f"{row.name} *" if row.is_baseline and len(rows) > 1 else row.name,
            **({} if set(outcomes) == {Outcome.OK} else {"outcome": outcome}),
            **_cells(row, shown),
        }
        for row, outcome in zip(rows, outcomes, strict=True)
    ]
    return Table.of(
        rows[0].comparison,
        title,
        lines,
        forms=dict(COLUMNS.values()),
        note=None
        if len(rows) == 1
        else "* the baseline, against which memory % and time % are changes. Intervals of time are of 95 %, for all "
        "variants at once.",
        expendable=tuple(COLUMNS[name][0] for name in EXPENDABLE),
    )


def _cells(row: Row, columns: Mapping[str, tuple[str, Form]]) -> dict[str, object]:
    """Return the metrics of a row by heading, with the interval of its time beside the time.

    A saving is a negative change, as those of time are.
    """
    cells: dict[str, object] = {}
    for name, (heading, _) in columns.items():
        value = row.metrics.get(name)
        cells[heading] = -value if value is not None and name == "memory_saving_percent" else value
        if name == "time_overhead_percent":
            change = time_change(row)
            cells[INTERVAL] = None if change is None else interval_text(change)
    return cells


def notes(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return a sentence for each variant that failed or was skipped, and what is to be said of one."""
    sentences = []
    for row in rows:
        if row.note:
            sentences.append(f"{row.name}: {row.note}")
        if row.skipped:
            sentences.append(f"{row.name}: skipped, {row.skipped}")
        elif row.result is not None and row.result.detail:
            sentences.append(f"{row.name}: {row.result.outcome}, {row.result.detail}")
    return (*sentences, *_of_predictions(rows))


def _of_predictions(rows: Sequence[Row]) -> list[str]:
    """Return why variants have no prediction, or what that lacks: a sentence for all with the same reason."""
    names = grouped((row.prediction, row.name) for row in rows if row.prediction)
    ran = sum(row.result is not None for row in rows)
    return [
        f"{f'all {ran} variants' if len(of) == ran > 1 else ', '.join(of)}: {reason}" for reason, of in names.items()
    ]


def _slowed_note(rows: Sequence[Row]) -> list[str]:
    """Return a sentence about the runs that do not count, because something else slowed them."""
    found = [
        f"{row.name}: {number} of {len(row.timings)}"
        for row in rows
        if (number := len(row.timings) - len(counting_timings(row.timings)))
    ]
    if not found:
        return []
    return [
        "Runs that took over 40 % longer than another one of their variant do not count, because something else used "
        f"this machine ({', '.join(found)})."
    ]
