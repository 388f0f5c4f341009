"""A job: the variants of an entry point against their baselines, or one configuration alone."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console
from rich.status import Status

from pipeline.base.results import Result, StepRecord
from pipeline.config.variants import Comparison, EntryPoint, Variant
from pipeline.report.sections import check_sections
from pipeline.runtime.environment import environment
from pipeline.runtime.shape_check import check_shapes
from pipeline.tracking.parent import ParentRun, open_parent
from pipeline.training.metrics import Row, Summary, against_baseline, common_settings

REFRESHES_PER_SECOND = 4
"""Of the line that shows a run's progress: each takes time from a training that uses every core."""


def measure(plan: EntryPoint, console: Console) -> int:
    """Run every variant of `plan`, print and log what they show; return the exit code: 1 where none completed."""
    check_sections(plan.sections)
    check_shapes(variant.experiment for variant in plan.variants)
    first = next(plan.variants).experiment
    about = environment(first.device)
    with open_parent(plan.entry, first.settings.model, first.settings.output) as parent:
        parent.params(common_settings([variant.experiment.params() for variant in plan.variants]))
        parent.tags({"device": str(first.device)})
        parent.file("environment.json", json.dumps(about, indent=1))
        rows: list[Row] = []
        try:
            for comparison in plan.comparisons:
                _run(plan, comparison, parent, rows, console)
        finally:
            if rows:
                _report(plan, rows, about, parent, console)
        parent.succeeded = any(row.result is not None and row.result.outcome.completed for row in rows)
    return 0 if parent.succeeded else 1


def _report(
    plan: EntryPoint, rows: Sequence[Row], about: Mapping[str, str], parent: ParentRun, console: Console
) -> None:
    """Print and log what the rows show; what tables and pictures need is loaded here, when nothing waits for it."""
    from pipeline.jobs.publish import publish
    from pipeline.report.comparison import ComparisonFindings, comparison_frame

    findings = ComparisonFindings(
        entry=plan.entry, question=plan.question, rows=tuple(rows), environment=about, sections=plan.sections
    )
    publish(findings, {"comparison.csv": comparison_frame(rows).to_csv(index=False)}, parent, console)


def _run(plan: EntryPoint, comparison: Comparison, parent: ParentRun, rows: list[Row], console: Console) -> None:
    """Run a comparison's variants, the baseline first, and add them to `rows`."""
    baseline: Row | None = None
    for variant in sorted(comparison.variants, key=lambda variant: variant.name != comparison.baseline):
        is_baseline = variant.name == comparison.baseline
        settings, params = variant.experiment.settings, variant.experiment.params()
        make_row = partial(Row, comparison=comparison.name, name=variant.name, is_baseline=is_baseline, params=params)
        if variant.skipped:
            rows.append(make_row(result=None, skipped=variant.skipped, metrics={}))
            continue
        name = variant.name if len(plan.comparisons) == 1 else f"{comparison.name}/{variant.name}"
        label = f"{name} ({len(rows) + 1} of {len(list(plan.variants))})"
        with console.status(f"{label}: starting", refresh_per_second=REFRESHES_PER_SECOND) as status:
            result, metrics = parent.run(
                name,
                variant.experiment,
                _summarize(variant, baseline),
                {"comparison": comparison.name, "variant": variant.name, "baseline": str(is_baseline).lower()},
                partial(_show, status, label, settings.num_steps),
            )
        row = make_row(result=result, skipped=None, metrics=metrics)
        rows.append(row)
        baseline = row if is_baseline else baseline
        console.print(f"{label}: {result.outcome} in {result.seconds_total:.1f} s", style="dim", highlight=False)


def _show(status: Status, label: str, num_steps: int, record: StepRecord) -> None:
    status.update(f"{label}: step {record.step + 1} of {num_steps}, loss {record.loss:.4f}")


def _summarize(variant: Variant, baseline: Row | None) -> Callable[[Result], Summary]:
    """Return Result -> summary, the metrics against the baseline included where there is one."""

    def metrics(result: Result) -> Summary:
        from pipeline.prediction.summary import summary

        own = summary(variant.experiment, result)
        if baseline is None or baseline.result is None:
            return own
        compared = against_baseline(result, dict(own.metrics), baseline.result, dict(baseline.metrics))
        return replace(own, metrics={**own.metrics, **compared})

    return metrics
