"""The report of a comparison: a table, four panels and a sentence for each, and the sections that its YAML names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from pipeline.base.results import Outcome
from pipeline.base.truncation import Truncation
from pipeline.base.units import MIB
from pipeline.report.other_trainings import other_trainings
from pipeline.report.page import Report, Section
from pipeline.report.plot import Bar, Panel, Plot, bars, colour, curves
from pipeline.report.sections import make_sections
from pipeline.report.table import Table
from pipeline.training.metrics import AGAINST_BASELINE, Row, common_settings

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
    """What cutting the corpus's documents at several lengths loses, of one run with padded sequences."""


def comparison_report(findings: ComparisonFindings) -> Report:
    """Return the report."""
    by_comparison: dict[str, list[Row]] = {}
    for row in findings.rows:
        by_comparison.setdefault(row.comparison, []).append(row)
    sections = [_section(findings.entry, name, rows) for name, rows in by_comparison.items()]
    sections += filter(None, (other_trainings(name, rows) for name, rows in by_comparison.items()))
    sections += make_sections(findings.sections, findings.rows)
    if findings.truncations:
        sections.append(_lengths(findings))
    answers = [(name, answer(rows)) for name, rows in by_comparison.items()]
    one = len(answers) == 1
    return Report(
        entry=findings.entry,
        question=findings.question,
        answer=" ".join(text if one else f"{readable(name).capitalize()}: {text}" for name, text in answers),
        sections=tuple(sections),
        environment=findings.environment,
        settings=common_settings([row.params for row in findings.rows]),
    )


def readable(name: str) -> str:
    """Return the name of a comparison with spaces instead of underscores."""
    return name.replace("_", " ")


def _section(entry: str, name: str, rows: Sequence[Row]) -> Section:
    title = f"{entry}: {readable(name)}"
    drawn = any(row.result is not None and row.result.steps for row in rows)
    shared = common_settings([row.params for row in rows])
    where = f"{title} ({', '.join(str(shared[name]) for name in ('model', 'device') if name in shared)})"
    return Section(
        title=title,
        tables=(overview_table(title, rows),),
        notes=notes(rows),
        plots=(overview_plot(where, rows),) if drawn else (),
    )


def _lengths(findings: ComparisonFindings) -> Section:
    """Return the table `lengths`: how many documents each length keeps whole, what it loses, and what it needs."""
    own = findings.rows[0].params["sequence_length"]
    lines = [
        {
            "sequence_length": f"{one.length} *" if one.length == own else str(one.length),
            "whole %": one.whole_percent,
            "tokens lost %": one.lost_tokens_percent,
            "targets lost %": one.lost_targets_percent,
            "left out": one.num_left_out,
            "predicted peak MiB": None if one.peak_bytes is None else one.peak_bytes / MIB,
        }
        for one in findings.truncations
    ]
    title = "lengths of documents, and what truncation at each loses and needs"
    forms = dict.fromkeys(("whole %", "tokens lost %", "targets lost %"), "{:.1f}") | {"predicted peak MiB": "{:,.1f}"}
    table = Table(name="lengths", title=title, frame=pd.DataFrame(lines), forms=forms, note="* this run")
    return Section(title="lengths", tables=(table,))


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
    return tuple(sentences)


def overview_plot(title: str, rows: Sequence[Row]) -> Plot:
    """Return loss curves, mean loss, time per optimizer step and peak memory of one comparison."""
    return Plot(
        name=rows[0].comparison,
        title=title,
        panels=(
            metric_bars(rows, "peak_allocated_mib", "peak memory in live tensors", "MiB"),
            metric_bars(
                rows,
                "seconds_per_step",
                "time per optimizer step (median, quartiles)",
                "seconds",
                spread="seconds_per_step_iqr",
            ),
            curves("loss", losses(rows), "loss"),
            metric_bars(rows, "mean_loss", "mean loss over all steps", "loss"),
        ),
    )


def answer(rows: Sequence[Row]) -> str:
    """Return the answer of one comparison as a sentence."""
    complete = [row for row in rows if {"peak_allocated_mib", "seconds_per_step"} <= set(row.metrics) and _ended(row)]
    baseline = next((row for row in complete if row.is_baseline), None)
    others = [row for row in complete if not row.is_baseline and set(AGAINST_BASELINE[:3]) <= set(row.metrics)]
    if baseline is None:
        ended = sum(map(_ended, rows))
        return f"{ended} of {len(rows)} runs completed; the baseline was not measured."
    cost = (
        f"{baseline.name} peaks at {baseline.metrics['peak_allocated_mib']:,.1f} MiB and takes "
        f"{baseline.metrics['seconds_per_step']:.3g} s per optimizer step"
    )
    if not others:
        return f"{cost}."
    smallest = max(others, key=lambda row: row.metrics["memory_saving_percent"])
    fastest = max(others, key=lambda row: row.metrics["speedup"])
    if smallest is fastest:
        return f"{cost}; of the others {smallest.name} uses the least memory and is the fastest: {_against(smallest)}."
    return (
        f"{cost}; of the others {smallest.name} uses the least memory ({_against(smallest)}), and {fastest.name} is "
        f"the fastest ({_against(fastest)})."
    )


def metric_bars(rows: Sequence[Row], name: str, title: str, unit: str, spread: str | None = None) -> Panel:
    """Return a bar for each variant; a variant without this metric shows its outcome instead."""
    values = []
    for index, row in enumerate(rows):
        value = row.metrics.get(name)
        missing = "not measured" if _ended(row) else outcome_of(row).replace("_", " ")
        half = row.metrics.get(spread, 0.0) / 2 if spread else 0.0
        text = missing if value is None else None
        values.append(Bar(name=row.name, value=value, shade=colour(index), text=text, spread=half))
    return bars(title, values, unit)


def losses(rows: Sequence[Row]) -> dict[str, list[tuple[float, float | None]]]:
    """Return the loss of each optimizer step, counted from 1, of each variant that has one."""
    return {
        row.name: [(record.step + 1, record.loss) for record in row.result.steps]
        for row in rows
        if row.result is not None and row.result.steps
    }


def outcome_of(row: Row) -> str:
    """Return the outcome of the row's run."""
    return row.result.outcome.value if row.result else "skipped"


def _ended(row: Row) -> bool:
    return row.result is not None and row.result.outcome.completed


def _against(row: Row) -> str:
    saving, overhead = row.metrics["memory_saving_percent"], row.metrics["time_overhead_percent"]
    memory = f"{saving:.0f} % less memory" if saving >= 0 else f"{-saving:.0f} % more memory"
    over = ", over the budget" if row.result and row.result.outcome is Outcome.OVER_BUDGET else ""
    return f"{memory} and {overhead:+.0f} % time per sample{over}"
