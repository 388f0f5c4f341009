"""A job that trains nothing: runs that MLflow has already, beside each other."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.base.errors import InvalidInputError
from pipeline.jobs.publish import publish
from pipeline.report.compare import incomparable
from pipeline.report.comparison import ComparisonFindings
from pipeline.report.overview import comparison_frame
from pipeline.tracking.history import CONDITIONS, History
from pipeline.tracking.job import open_job
from pipeline.training.metrics import AGAINST_BASELINE, Row, against_baseline, common_settings


def compare(
    runs: str | None,
    experiment: str | None,
    filter_string: str | None,
    baseline: str | None,
    output: Path,
    console: Console,
) -> int:
    """Print and log the report of runs by id, or by experiment and filter string; return the exit code 0.

    Raises:
        InvalidInputError: nothing says which runs, or what it says matches none.

    """
    if runs is None and experiment is None and filter_string is None:
        raise InvalidInputError(
            "compare needs to know which runs: set runs=ID,ID, or experiment=NAME, or filter=\"tags.technique = 'x'\""
        )
    if runs is not None and (experiment is not None or filter_string is not None):
        raise InvalidInputError("runs are chosen by id or by experiment and filter; set runs, or the other two")
    history = History()
    ids = [part.strip() for part in runs.split(",") if part.strip()] if runs else []
    chosen = history.by_id(ids) if ids else history.by_filter(experiment, filter_string)
    rows = _rows(history, chosen, baseline)
    with open_job("compare", f"{len(rows)} runs", output) as job:
        findings = ComparisonFindings(
            entry="compare",
            question=f"How do these {len(rows)} runs compare?",
            rows=tuple(rows),
            environment=common_settings([_conditions(row) for row in rows]),
        )
        job.tags({"runs": ", ".join(run.info.run_id for run in chosen)[:5000]})
        publish(findings, {"comparison.csv": comparison_frame(rows).to_csv(index=False)}, job, console)
    return 0


def _rows(history: History, runs: Sequence[Any], baseline: str | None) -> list[Row]:
    """Return the runs with the baseline first, measured against it where that has a meaning."""
    ids = [run.info.run_id for run in runs]
    if baseline is not None and baseline not in ids:
        raise InvalidInputError(f"the baseline must be one of the runs compared, and {baseline!r} is not; leave it out")
    first = baseline or ids[0]
    ordered = sorted(runs, key=lambda run: run.info.run_id != first)
    names = _names(ordered)
    rows = [history.row(run, run.info.run_id == first, name, "runs") for run, name in zip(ordered, names, strict=True)]
    return [_alone(rows[0]), *(_against(row, rows[0]) for row in rows[1:])]


def _conditions(row: Row) -> dict[str, str]:
    """Return under which conditions a run was measured, as far as it says."""
    return {name: str(row.params[name]) for name in CONDITIONS if name in row.params}


def _names(runs: Sequence[Any]) -> list[str]:
    """Return names that tell the runs apart: the technique where there are several, the id where names repeat."""
    techniques = {run.data.tags.get("technique") for run in runs}
    names = [str(run.info.run_name) for run in runs]
    if len(techniques) > 1:
        names = [f"{run.data.tags.get('technique', '?')}: {name}" for run, name in zip(runs, names, strict=True)]
    count = Counter(names)
    return [
        name if count[name] == 1 else f"{name} {run.info.run_id[:6]}" for run, name in zip(runs, names, strict=True)
    ]


def _against(row: Row, baseline: Row) -> Row:
    """Return the row measured against this baseline, where that has a meaning."""
    alone = _alone(row)
    if row.result is None or baseline.result is None or incomparable(row, baseline) - {"effective batch"}:
        return alone
    own, others = dict(alone.metrics), dict(baseline.metrics)
    return replace(row, metrics=own | against_baseline(row.result, own, baseline.result, others))


def _alone(row: Row) -> Row:
    """Return the row without what it was compared with when it was measured."""
    return replace(row, metrics={name: value for name, value in row.metrics.items() if name not in AGAINST_BASELINE})
