"""Publishes a job's report: in the terminal, on disk, in MLflow, and as the description of the MLflow run."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from pipeline.base.progress import progress
from pipeline.jobs.answer_values import answer_of
from pipeline.jobs.printing import say, say_notes
from pipeline.report.findings import FILE, Findings, progress_of, report_of, to_json
from pipeline.report.page import PAGE, Report, Source, to_html, to_markdown
from pipeline.tracking.job import Job


def publish(findings: Findings, job: Job, console: Console, *, said: Sequence[str] = ()) -> None:
    """Print the report, its answer last, and log it with its tables, its plots and its page.

    Notes that have been `said` before the job began are not printed again.
    """
    uri, experiment_id, run_id = job.manifest.uri, job.manifest.experiment_id, str(job.manifest.run_id)
    source = Source(folder=job.folder, uri=uri, experiment_id=experiment_id, run_id=run_id)
    job.file(FILE, to_json(findings, source))  # first, so that the findings are kept if the report fails
    if so_far := progress_of(findings):
        job.tags({"interrupted": so_far})
    metrics, settings = answer_of(findings)
    job.metrics(metrics)
    job.params(settings)
    report = report_of(findings)
    for table in report.tables:
        job.file(f"{table.name}.csv", table.frame.to_csv(index=False))
    show(report, console, said)  # before the plots, which take a second
    with progress("writing the page"):
        for plot in report.plots:
            job.file(f"plots/{plot.name}.png", plot.to_png(), "plots")
        job.file(PAGE, to_html(report, source=source))
    job.describe(report.question, report.answer, to_markdown(report))
    _show_page(job, console)
    if report.commands and not report.is_repeated:
        title, line = report.commands[0]
        console.print(f"{title[0].lower()}{title[1:]}:", highlight=False)
        console.print(f"  {line}", highlight=False, soft_wrap=True)


def show(report: Report, console: Console, said: Sequence[str] = ()) -> None:
    """Print the tables, the notes and, last, the answer."""
    for place, table in enumerate(table for table in report.tables if table.num_in_terminal != 0):
        if place:
            console.print()
        console.print(table.to_terminal(console.width))
    several = sum(bool(section.why) for section in report.sections) > 1
    for section in report.sections:
        if section.why:
            say(console, " ".join((*([f"{section.title}:"] if several else ()), *section.why)), "yellow")
    say_notes(console, [note for section in report.sections for note in section.notes], said)
    if any(section.left_out and section.tables for section in report.sections):
        say(console, "why configurations were left out of the space is on the page")
    say(console, report.answer, "bold")


def _show_page(job: Job, console: Console) -> None:
    """Print where the page is, as a link where the terminal shows links, and the job's run in MLflow."""
    page = job.folder / PAGE
    link = (str(page), f"link {page.absolute().as_uri()}")
    line = Text.assemble("results: ", link, f" and MLflow run {job.manifest.run_id}")
    console.print(line, highlight=False, soft_wrap=True)
