"""The report of runs beside each other: what every comparison shows, and what its technique adds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pipeline.report.overview import answer, notes, overview_plot, overview_table
from pipeline.report.page import Report, Section
from pipeline.training.metrics import Row, common_settings


@dataclass(frozen=True, kw_only=True)
class ComparisonFindings:
    """All that the report of a comparison is made from."""

    entry: str
    question: str
    rows: tuple[Row, ...]
    environment: Mapping[str, str]


def comparison_report(findings: ComparisonFindings) -> Report:
    """Return the report; a file of this folder that is named like the entry point adds its own tables and pictures."""
    by_comparison: dict[str, list[Row]] = {}
    for row in findings.rows:
        by_comparison.setdefault(row.comparison, []).append(row)
    sections = [_section(findings.entry, name, rows) for name, rows in by_comparison.items()]
    own = _own_report(findings.entry)
    if own is not None:
        tables, plots = own.tables(findings.rows), own.plots(findings.rows)
        if tables or plots:
            sections.append(Section(title=f"{findings.entry}, looked at closely", tables=tables, plots=plots))
    answers = [(name, answer(rows)) for name, rows in by_comparison.items()]
    one = len(answers) == 1
    return Report(
        entry=findings.entry,
        question=findings.question,
        answer=" ".join(text if one else f"{in_words(name).capitalize()}: {text}" for name, text in answers),
        sections=tuple(sections),
        environment=findings.environment,
        settings=common_settings([row.params for row in findings.rows]),
    )


def in_words(name: str) -> str:
    """Return the name of a comparison as people write it."""
    return name.replace("_", " ")


def _section(entry: str, name: str, rows: Sequence[Row]) -> Section:
    title = f"{entry}: {in_words(name)}"
    drawn = any(row.result is not None and row.result.steps for row in rows)
    shared = common_settings([row.params for row in rows])
    where = f"{title} ({', '.join(str(shared[name]) for name in ('model', 'device') if name in shared)})"
    return Section(
        title=title,
        tables=(overview_table(title, rows),),
        notes=notes(rows),
        plots=(overview_plot(where, rows),) if drawn else (),
    )


def _own_report(entry: str) -> Any | None:
    """Return report/`entry`.py, with its functions `tables` and `pictures`, where there is such a file."""
    name = f"pipeline.report.{entry}"
    return None if find_spec(name) is None else import_module(name)
