"""The entry points that compare variants, and `main`: what does each variant cost, and what does it save?"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status

from pipeline.base.results import Result, StepRecord
from pipeline.config.variants import Comparison, EntryPoint, Variant
from pipeline.jobs.lengths import document_lengths, left_out, predicted_truncations
from pipeline.jobs.live_page import LivePage
from pipeline.jobs.policies import with_policies
from pipeline.jobs.published_type import published_type_note
from pipeline.report.sections import check_sections
from pipeline.runtime.environment import environment
from pipeline.runtime.observer import Observer, Run
from pipeline.runtime.run import run
from pipeline.runtime.shape_check import check_shapes
from pipeline.tracking.job import Job, open_job
from pipeline.training.metrics import PREDICTION, Row, Summary, against_baseline, common_settings
from pipeline.training.typical_step import evaluation_note, lengths_note

if TYPE_CHECKING:
    from pipeline.report.comparison import ComparisonFindings

REFRESHES_PER_SECOND = 4
"""Of the progress line: each refresh takes time from a training that uses every core."""


def measure(plan: EntryPoint, console: Console) -> int:
    """Run every variant of `plan`, print and log the report; return the exit code: 1 if none completed."""
    check_sections(plan.sections)
    check_shapes(variant.experiment for variant in plan.variants)
    plan = with_policies(plan)
    first = next(plan.variants).experiment
    about = environment(first.device)
    for note in filter(None, (left_out(first), lengths_note(first), evaluation_note(first))):
        console.print(note, style="yellow", highlight=False)
    with open_job(plan.entry, first.settings.model, first.settings.output) as job:
        job.params(common_settings([variant.experiment.params() for variant in plan.variants]))
        job.tags({"device": str(first.device)})
        job.file("environment.json", json.dumps(about, indent=1))
        rows: list[Row] = []
        page, is_whole = LivePage(job.folder, console), False
        try:
            for comparison in plan.comparisons:
                _run_comparison(plan, comparison, job, rows, partial(_write, page, plan, rows, about), console)
            is_whole = True
        finally:
            if rows:
                findings = _findings(plan, rows, about)  # whoever has pressed Ctrl-C does not wait for predictions
                _report(_with_predictions(plan, findings) if is_whole else findings, job, console)
        job.succeeded = any(row.completed for row in rows)
    return 0 if job.succeeded else 1


class ProgressLine(Observer):
    """The line of the terminal that shows the optimizer step and loss of a run."""

    def __init__(self, status: Status, label: str, num_steps: int) -> None:
        self._status, self._label, self._num_steps = status, label, num_steps

    def step(self, record: StepRecord) -> None:
        """Show an optimizer step."""
        self._status.update(f"{self._label}: step {record.step + 1} of {self._num_steps}, loss {record.loss:.4f}")


def _run_comparison(
    plan: EntryPoint,
    comparison: Comparison,
    job: Job,
    rows: list[Row],
    after_run: Callable[[], None],
    console: Console,
) -> None:
    """Run a comparison's variants, the baseline first, and add them to `rows`."""
    baseline: Row | None = None
    for variant in sorted(comparison.variants, key=lambda variant: variant.name != comparison.baseline):
        is_baseline = variant.name == comparison.baseline
        make_row = partial(
            Row,
            comparison=comparison.name,
            name=variant.name,
            is_baseline=is_baseline,
            params=variant.experiment.params(),
        )
        name = variant.name if len(plan.comparisons) == 1 else f"{comparison.name}/{variant.name}"
        label = f"{name} ({len(rows) + 1} of {len(list(plan.variants))})"
        if variant.skipped:
            rows.append(make_row(result=None, skipped=variant.skipped, metrics={}))
            console.print(f"{label}: skipped", style="dim", highlight=False)
            continue
        this = Run(
            name=name,
            experiment=variant.experiment,
            folder=job.folder / name.replace("/", "-"),
            labels={"comparison": comparison.name, "variant": variant.name, "baseline": str(is_baseline).lower()},
        )
        with console.status(f"{label}: starting", refresh_per_second=REFRESHES_PER_SECOND) as status:
            progress = ProgressLine(status, label, variant.experiment.settings.num_steps)
            result, summary = run(
                this, [job.children.observer(), progress], summarize=partial(_summarize, variant, baseline)
            )
        row = make_row(result=result, skipped=None, metrics=summary.metrics, prediction=summary.tags.get(PREDICTION))
        rows.append(row)
        baseline = row if is_baseline else baseline
        console.print(f"{label}: {result.outcome} in {result.seconds_total:.1f} s", style="dim", highlight=False)
        after_run()


def _summarize(variant: Variant, baseline: Row | None, result: Result) -> Summary:
    """Return the summary of a variant, with the metrics against the baseline if there is one."""
    from pipeline.prediction.summary import summary  # imported after the training has started

    own = summary(variant.experiment, result)
    if baseline is None or baseline.result is None:
        return own
    compared = against_baseline(result, dict(own.metrics), baseline.result, dict(baseline.metrics))
    return replace(own, metrics={**own.metrics, **compared})


def _write(page: LivePage, plan: EntryPoint, rows: Sequence[Row], about: Mapping[str, str]) -> None:
    """Write the page of what is measured, if anything is left to run."""
    total = len(list(plan.variants))
    if len(rows) < total:
        page.write(partial(_findings, plan, rows, about), f"{len(rows)} of {total} variants")


def _findings(plan: EntryPoint, rows: Sequence[Row], about: Mapping[str, str]) -> "ComparisonFindings":
    """Return the findings of these rows; pandas and Altair are imported here, between and after the runs."""
    from pipeline.report.comparison import ComparisonFindings

    return ComparisonFindings(
        entry=plan.entry, question=plan.question, rows=tuple(rows), environment=about, sections=plan.sections
    )


def _report(findings: "ComparisonFindings", job: Job, console: Console) -> None:
    """Print and log the report."""
    from pipeline.jobs.publish import publish
    from pipeline.report.comparison import comparison_frame

    publish(findings, {"comparison.csv": comparison_frame(findings.rows).to_csv(index=False)}, job, console)


def _with_predictions(plan: EntryPoint, findings: "ComparisonFindings") -> "ComparisonFindings":
    """Return the findings with what other lengths, and the type of the checkpoint, would need.

    The note on the type is that of the first full fine-tuning, the lengths are those of the first run.
    """
    experiments = {
        (comparison.name, variant.name): variant.experiment
        for comparison in plan.comparisons
        for variant in comparison.variants
    }
    notes = ((name, published_type_note(experiment)) for name, experiment in experiments.items())
    noted, note = next(((name, note) for name, note in notes if note), (None, None))
    first = experiments[findings.rows[0].comparison, findings.rows[0].name]
    return replace(
        findings,
        rows=tuple(replace(row, note=note) if (row.comparison, row.name) == noted else row for row in findings.rows),
        truncations=predicted_truncations(first),
        lengths=document_lengths(first),
    )
