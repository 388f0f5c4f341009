"""The report of comparisons: the answer, what each variant saves and costs, curves and bars, and tables last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from pipeline.base.results import Outcome
from pipeline.base.truncation import LengthBin, Truncation
from pipeline.config.experiment import VARYING
from pipeline.report.answers import answer, command, command_title, headlines, outcome_of, readable, short_answer
from pipeline.report.lengths import lengths_section
from pipeline.report.losses import losses_panel
from pipeline.report.other_trainings import other_trainings
from pipeline.report.overview import overview_plots
from pipeline.report.page import Report, Section
from pipeline.report.plot import Plot
from pipeline.report.sections import LADDER, make_sections
from pipeline.report.table import Table
from pipeline.report.tradeoff import tradeoff_plot
from pipeline.training.metrics import Row, common_settings

COLUMNS = {
    "peak_allocated_mib": ("peak MiB", "{:,.1f}"),
    "peak_reserved_mib": ("reserved MiB", "{:,.1f}"),
    "prediction_error_percent": ("prediction error %", "{:+.2f}"),
    "memory_saving_percent": ("saved %", "{:+.1f}"),
    "seconds_per_step": ("s/step", "{:.4f}"),
    "time_overhead_percent": ("time %", "{:+.1f}"),
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
UNSTEADY = 0.2
"""Interquartile range of the step times over their median, from which on a run was disturbed."""


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


def comparison_report(findings: ComparisonFindings) -> Report:
    """Return the report."""
    by_comparison: dict[str, list[Row]] = {}
    for row in findings.rows:
        by_comparison.setdefault(row.comparison, []).append(row)
    steps = make_sections([name for name in findings.sections if name == WATERFALL], findings.rows)
    sections = [
        *_first(by_comparison, steps),
        *_comparisons(findings.entry, by_comparison),
        *filter(None, (other_trainings(name, rows) for name, rows in by_comparison.items())),
        *make_sections([name for name in findings.sections if name != WATERFALL], findings.rows),
        *lengths_section(findings.rows[0], findings.truncations, findings.lengths),
    ]
    one = len(by_comparison) == 1
    answers = [
        answer(rows) if one else f"{_capitalized(readable(name))}: {short_answer(rows)}"
        for name, rows in by_comparison.items()
    ]
    if any(unsteady(rows)[0] for rows in by_comparison.values()):
        answers.append("Times are uncertain: step times varied widely.")
    return Report(
        entry=findings.entry,
        question=findings.question,
        answer=" ".join(answers),
        headlines=headlines(by_comparison),
        command=command(by_comparison),
        command_title=command_title(by_comparison),
        sections=tables_last(sections),
        environment=findings.environment,
        settings=common_settings([row.params for row in findings.rows]),
    )


def _capitalized(text: str) -> str:
    """Return a text as it begins a sentence; a name within it stays as it is."""
    return text[:1].upper() + text[1:]


def _first(comparisons: Mapping[str, Sequence[Row]], steps: Sequence[Section]) -> list[Section]:
    """Return the charts that answer the question: each variant against its baseline, and the steps of a ladder.

    Of a ladder beside other comparisons the steps come first, and its variants are not shown twice.
    """
    is_beside = bool(steps) and len(comparisons) > 1
    pairs = tradeoff_plot(
        {name: shown(rows) for name, rows in comparisons.items() if not (is_beside and name == LADDER)}
    )
    paired = [Section(title=pairs.title, plots=(pairs,))] if pairs else []
    return [*steps, *paired] if is_beside else [*paired, *steps]


def tables_last(sections: Sequence[Section]) -> tuple[Section, ...]:
    """Return the sections with their plots, then one with all of their tables."""
    tables = tuple(table for section in sections for table in section.tables)
    drawn = [replace(section, tables=()) for section in sections if section.plots or section.notes or section.headlines]
    return (*drawn, *([Section(title="tables", tables=tables)] if tables else []))


def shown(rows: Sequence[Row]) -> list[Row]:
    """Return the variants that charts show: the baseline, and of very many the fastest, in their order."""
    ranked = sorted(rows, key=lambda row: (not row.is_baseline, -row.metrics.get("samples_per_second", 0.0)))
    kept = {id(row) for row in ranked[:MOST_SHOWN]}
    return [row for row in rows if id(row) in kept]


def _comparisons(entry: str, comparisons: Mapping[str, Sequence[Row]]) -> list[Section]:
    """Return a section for each comparison, and one for all of a pair each, which the first chart shows otherwise."""
    sections, pairs = [], []
    for name, rows in comparisons.items():
        of_one = "all variants" if len(rows) > 1 else rows[0].name
        section = _section(f"{entry}: {readable(name) if len(comparisons) > 1 else of_one}", rows)
        if len(comparisons) > 1 and len(rows) == 2 and section.plots:
            plot = Plot(name=name, title=readable(name), panels=(losses_panel(rows, readable(name)),))
            pairs.append(replace(section, plots=(plot,)))
        else:
            sections.append(section)
    if pairs:
        sections.append(
            Section(
                title=f"{entry}: pairs",
                tables=tuple(table for section in pairs for table in section.tables),
                notes=tuple(note for section in pairs for note in section.notes),
                plots=tuple(plot for section in pairs for plot in section.plots),
            )
        )
    return sections


def _section(title: str, rows: Sequence[Row]) -> Section:
    drawn = any(row.result is not None and row.result.steps for row in rows)
    shared = common_settings([row.params for row in rows])
    where = f"{title} ({', '.join(str(shared[name]) for name in ('model', 'device') if name in shared)})"
    hidden = len(rows) - len(shown(rows))
    more = f"Charts show the baseline and the fastest: {hidden} more runs are in the table."
    return Section(
        title=title,
        tables=(overview_table(title, rows),),
        notes=(*([more] if hidden else []), *notes(rows), *_unsteady_note(rows)),
        plots=overview_plots(where, shown(rows)) if drawn else (),
    )


def comparison_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Return a row for each variant: its comparison, outcome, settings and metrics."""
    return pd.DataFrame(
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
    )


def overview_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the table of one comparison; a star marks the baseline."""
    shown = {name: form for name, form in COLUMNS.items() if any(name in row.metrics for row in rows)}
    outcomes = [outcome_of(row) for row in rows]
    lines = [
        {
            "variant": f"{row.name} *" if row.is_baseline and len(rows) > 1 else row.name,
            **({} if set(outcomes) == {Outcome.OK} else {"outcome": outcome}),
            **{heading: row.metrics.get(name) for name, (heading, _) in shown.items()},
        }
        for row, outcome in zip(rows, outcomes, strict=True)
    ]
    return Table(
        name=rows[0].comparison,
        title=title,
        frame=pd.DataFrame(lines),
        forms=dict(COLUMNS.values()),
        note="* the baseline" if len(rows) > 1 else None,
        expendable=tuple(COLUMNS[name][0] for name in EXPENDABLE),
    )


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
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.prediction:
            names.setdefault(row.prediction, []).append(row.name)
    ran = sum(row.result is not None for row in rows)
    return [
        f"{f'all {ran} variants' if len(of) == ran > 1 else ', '.join(of)}: {reason}" for reason, of in names.items()
    ]


def unsteady(rows: Sequence[Row]) -> tuple[list[str], int]:
    """Return the names of the runs whose step times varied too much to be compared, and how many were looked at.

    Runs whose micro-batches have different lengths are left out: their step times vary in any case.
    """
    timed = [
        row
        for row in rows
        if row.completed and "seconds_per_step_iqr" in row.metrics and row.params.get("sequences") not in VARYING
    ]
    spreads = {row.name: row.metrics["seconds_per_step_iqr"] / row.metrics["seconds_per_step"] for row in timed}
    return [name for name, spread in spreads.items() if spread > UNSTEADY], len(timed)


def _unsteady_note(rows: Sequence[Row]) -> list[str]:
    names, num_timed = unsteady(rows)
    if not names:
        return []
    return [
        f"In {len(names)} of {num_timed} runs the interquartile range of the step times is more than "
        f"{100 * UNSTEADY:.0f} % of their median ({', '.join(names)}): something else used this machine, or the steps "
        "are too few. Repeat these runs before you compare their times."
    ]
