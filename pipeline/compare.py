"""A job: the variants of an entry point against their baselines, or one configuration alone."""

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.status import Status

from pipeline.contracts import Result, StepRecord
from pipeline.environment import environment
from pipeline.metrics import Row, against_baseline, summarize
from pipeline.report.overview import comparison_frame, frame_table, notes, overview_figure, terminal_table
from pipeline.tracking.parent import ParentRun, open_parent
from pipeline.variants import Comparison, Plan, Variant


def compare(plan: Plan, console: Console) -> int:
    """Run every variant of `plan`, print and log what they show; return the exit code: 1 where none completed."""
    variants = list(plan.variants)
    first = variants[0].experiment
    with open_parent(plan.entry, first.settings.output) as parent:
        parent.params(_common_params(variants))
        parent.tags({"question": plan.question, "device": str(first.device)})
        parent.file("environment.json", json.dumps(environment(first.device), indent=1))
        rows: list[Row] = []
        try:
            for comparison in plan.comparisons:
                _run(comparison, len(variants), parent, rows, console)
        finally:
            if rows:
                _report(plan, rows, parent, console)
        parent.succeeded = any(row.result is not None and row.result.outcome.completed for row in rows)
    return 0 if parent.succeeded else 1


def _run(comparison: Comparison, num_variants: int, parent: ParentRun, rows: list[Row], console: Console) -> None:
    """Run a comparison's variants, the baseline first, and add them to `rows`."""
    baseline: Row | None = None
    for variant in sorted(comparison.variants, key=lambda variant: variant.name != comparison.baseline):
        is_baseline = variant.name == comparison.baseline
        settings, params = variant.experiment.settings, variant.experiment.params()
        make_row = partial(Row, comparison=comparison.name, name=variant.name, is_baseline=is_baseline, params=params)
        if variant.skipped:
            rows.append(make_row(result=None, skipped=variant.skipped, figures={}))
            continue
        label = f"{comparison.name}/{variant.name} ({len(rows) + 1} of {num_variants})"
        with console.status(f"{label}: starting") as status:
            result, figures = parent.run(
                f"{comparison.name}/{variant.name}",
                variant.experiment,
                _figures(variant, baseline),
                {"comparison": comparison.name, "variant": variant.name},
                partial(_show, status, label, settings.num_steps),
            )
        row = make_row(result=result, skipped=None, figures=figures)
        rows.append(row)
        baseline = row if is_baseline else baseline
        console.print(f"{label}: {result.outcome} in {result.seconds_total:.1f} s", style="dim", highlight=False)


def _show(status: Status, label: str, num_steps: int, record: StepRecord) -> None:
    status.update(f"{label}: step {record.step + 1} of {num_steps}, loss {record.loss:.4f}")


def _figures(variant: Variant, baseline: Row | None) -> Callable[[Result], dict[str, float]]:
    """Return Result -> summary metrics, those against the baseline included where there is one."""

    def figures(result: Result) -> dict[str, float]:
        settings = variant.experiment.settings
        own = summarize(result, variant.experiment.effective_batch_size, settings.timing_warmup_steps)
        if baseline is None or baseline.result is None:
            return own
        return own | against_baseline(result, own, baseline.result, dict(baseline.figures))

    return figures


def _report(plan: Plan, rows: list[Row], parent: ParentRun, console: Console) -> None:
    """Print the tables, and log them with the figures on the parent."""
    parent.file("comparison.csv", comparison_frame(rows).to_csv(index=False))
    for comparison in plan.comparisons:
        shown = [row for row in rows if row.comparison == comparison.name]
        if not shown:
            continue
        console.print(terminal_table(f"{plan.entry}: {comparison.name}".replace("_", " "), shown))
        for note in notes(shown):
            console.print(note, style="yellow", highlight=False)
        if any(row.result is not None and row.result.steps for row in shown):
            title = (
                f"{plan.entry}: {comparison.name} ({shown[0].params['model']}, {shown[0].params['device']})".replace(
                    "_", " "
                )
            )
            parent.file(f"figures/{comparison.name}.png", overview_figure(title, shown), "figures")
    own = _own_report(plan.entry)
    for name, frame in own.tables(rows).items() if own else ():
        console.print(frame_table(name, frame))
        parent.file(f"{name}.csv", frame.to_csv(index=False))
    for name, picture in own.figures(rows).items() if own else ():
        parent.file(f"figures/{name}.png", picture, "figures")
    console.print(f"results: {parent.folder} and MLflow run {parent.run_id}", highlight=False)


def _own_report(entry: str) -> Any | None:
    """Return report/`entry`.py, with its functions `tables` and `figures`, where there is such a file."""
    name = f"pipeline.report.{entry}"
    return None if find_spec(name) is None else import_module(name)


def _common_params(variants: list[Variant]) -> dict[str, object]:
    """Return the settings that are the same in all variants."""
    params = [variant.experiment.params() for variant in variants]
    return {name: value for name, value in params[0].items() if all(name in p and p[name] == value for p in params)}
