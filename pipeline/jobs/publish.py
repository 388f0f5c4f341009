"""A job's report to its readers: the terminal, the files on disk and in MLflow, and the run's description."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import write_atomically
from pipeline.report.findings import FILE, Findings, read_findings, report_of, to_json
from pipeline.report.page import Report, to_html, to_markdown
from pipeline.tracking.job import Job


def publish(findings: Findings, csv: Mapping[str, str], job: Job, console: Console) -> None:
    """Print the report, and log it with its tables and pictures; `csv` adds files by name."""
    job.file(FILE, to_json(findings))  # whatever becomes of the report, what was found is kept
    for name, content in csv.items():
        job.file(name, content)
    report = report_of(findings)
    show(report, console)
    for table in report.tables:
        job.file(f"{table.name}.csv", table.frame.to_csv(index=False))
    for plot in report.plots:
        job.file(f"plots/{plot.name}.png", plot.to_png(), "plots")
    job.file("report.html", to_html(report))
    job.describe(report.question, report.answer, to_markdown(report))
    console.print(f"results: {job.folder} and MLflow run {job.run_id}", highlight=False)


def publish_again(folder: Path, console: Console) -> int:
    """Make the page of a finished job anew from what it has found, and return the exit code 0.

    Raises:
        InvalidInputError: the folder holds no findings, or cannot be written.

    """
    report = report_of(read_findings(folder))
    show(report, console)
    page = folder / "report.html"
    try:
        write_atomically(page, to_html(report).encode())
    except OSError as error:
        raise InvalidInputError(f"{page} must be writable, and is not ({error.strerror}); mend that") from error
    console.print(f"written: {page}", highlight=False)
    return 0


def show(report: Report, console: Console) -> None:
    """Print the tables, what is to be known about them, and the answer."""
    for section in report.sections:
        for table in section.tables:
            console.print(table.to_terminal())
        for note in section.notes:
            console.print(note, style="yellow", highlight=False)
    console.print(report.answer, highlight=False)
