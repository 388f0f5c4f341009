"""`fitproof report`: the page of a finished job, written again from its findings."""

from pathlib import Path

from rich.console import Console

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import write_atomically
from pipeline.base.settings import Settings


class ReportSettings(Settings):
    """The setting of `report`."""

    folder: Path
    """Folder of a finished job, such as runs/20260131-120000-combined-x1y2z3."""


def report(settings: ReportSettings, console: Console) -> int:
    """Print the report, write its page and return the exit code 0.

    Raises:
        InvalidInputError: the folder has no findings, or cannot be written.

    """
    from pipeline.jobs.publish import show
    from pipeline.report.findings import read_findings, read_source, report_of
    from pipeline.report.page import PAGE, to_html

    found = report_of(read_findings(settings.folder))
    show(found, console)
    page = settings.folder / PAGE
    try:
        write_atomically(page, to_html(found, source=read_source(settings.folder)).encode())
    except OSError as error:
        raise InvalidInputError(
            f"{page} must be writable, and is not ({error.strerror}); change its permissions, or copy the folder"
        ) from error
    console.print(f"written: {page}", highlight=False)
    return 0
