"""`fitproof sync`: results that could not reach the tracking store, sent again."""

from pathlib import Path

from rich.console import Console

from pipeline.base.settings import RESULTS, Settings


class SyncSettings(Settings):
    """The settings of `sync`."""

    output: Path = RESULTS
    """Folder with the results of earlier jobs."""
    others_ended: bool = False
    """Whether processes of other machines, which cannot be seen from here, have ended: their results are sent too."""


def sync(settings: SyncSettings, console: Console) -> int:
    """Send what is missing and return the exit code: 1 if something could not be sent.

    Raises:
        InvalidInputError: the folder has no results of jobs.

    """
    from pipeline.tracking.sync import sync as send

    complete = True
    for text, is_sent in send(settings.output, others_ended=settings.others_ended):
        console.print(text, highlight=False, soft_wrap=True)
        complete = complete and is_sent
    if complete:
        console.print(f"nothing below {settings.output} is left to send", highlight=False)
    return 0 if complete else 1
