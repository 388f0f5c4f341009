"""Publishes a job's report: in the terminal, on disk, in MLflow, and as the description of the MLflow run."""

from collections.abc import Mapping

from rich.console import Console

from pipeline.jobs.answer_values import answer_metrics, answer_settings
from pipeline.report.findings import FILE, Findings, progress_of, report_of, to_json
from pipeline.report.page import Report, to_html, to_markdown
from pipeline.tracking.job import Job


def publish(
    findings: Findings, csv: Mapping[str, str], job: Job, console: Console, *, is_answer_last: bool = False
) -> None:
    """Print the report, and log it with its tables and plots; `csv` adds files by name.

    The answer is printed first, or last, where the output of the user's own command has come before.
    """
    job.file(FILE, to_json(findings))  # first, so that the findings are kept if the report fails
    if progress := progress_of(findings):
        job.tags({"interrupted": progress})
    job.metrics(answer_metrics(findings))
    job.params(answer_settings(findings))
    for name, content in csv.items():
        job.file(name, content)
    report = report_of(findings)
    if not is_answer_last:
        console.print(report.answer, highlight=False)
    show_tables(report, console)
    for table in report.tables:
        job.file(f"{table.name}.csv", table.frame.to_csv(index=False))
    for plot in report.plots:
        job.file(f"plots/{plot.name}.png", plot.to_png(), "plots")
    job.file("report.html", to_html(report))
    job.describe(report.question, report.answer, to_markdown(report))
    console.print(f"results: {job.folder} and MLflow run {job.run_id}", highlight=False)
    if is_answer_last:
        console.print(report.answer, highlight=False)


def show(report: Report, console: Console) -> None:
    """Print the answer, then the tables with their notes."""
    console.print(report.answer, highlight=False)
    show_tables(report, console)


def show_tables(report: Report, console: Console) -> None:
    """Print the tables with their notes."""
    for section in report.sections:
        for table in section.tables:
            if table.num_in_terminal != 0:
                console.print(table.to_terminal(console.width))
        for note in (*section.why, *section.notes):
            console.print(note, style="yellow", highlight=False)
