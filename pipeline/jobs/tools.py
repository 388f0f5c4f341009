"""What trains nothing: runs of MLflow compared, a page made anew, files for other frameworks, what is unsent sent."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.base.contracts import Settings
from pipeline.config.settings import RunSettings, validate
from pipeline.config.variants import load_single


class CompareSettings(Settings):
    """The settings of `compare`."""

    runs: str | None = None
    """Ids of MLflow runs, separated by commas; that of a parent stands for all of its children."""
    experiment: str | None = None
    """Name of an MLflow experiment, all of whose measured runs are meant."""
    filter: str | None = None
    """MLflow's filter string, which chooses among them: params.precision = 'bf16' and metrics.final_loss < 7."""
    baseline: str | None = None
    """Id of the run with which the others are compared; the first one by default."""
    output: Path = RunSettings.model_fields["output"].default
    """Folder of the results on local disk."""


class ReportSettings(Settings):
    """The setting of `report`."""

    folder: Path
    """Folder of a finished job, such as runs/20260131-120000-combined-x1y2z3."""


class HandoverSettings(Settings):
    """The settings of `handover`."""

    config: Path = Path("best.yaml")
    """The YAML file to hand over: best.yaml of a search, or the config.yaml of any run."""
    output: Path = Path("handover")
    """Folder of the files for other frameworks."""


class SyncSettings(Settings):
    """The setting of `sync`."""

    output: Path = RunSettings.model_fields["output"].default
    """Folder with the results of jobs, whose unsent records are to be sent."""


def use(tool: str, given: Mapping[str, Any], console: Console) -> int:
    """Use a tool with these settings; return the exit code: 0 done, 1 where something stays unsent.

    Raises:
        InvalidInputError: a setting is wrong.

    """
    kind, function = TOOLS[tool], USES[tool]
    return function(validate(kind, given, tool), console)


def _compare(settings: CompareSettings, console: Console) -> int:
    from pipeline.jobs.compare import compare

    return compare(settings.runs, settings.experiment, settings.filter, settings.baseline, settings.output, console)


def _report(settings: ReportSettings, console: Console) -> int:
    from pipeline.jobs.publish import publish_again

    return publish_again(settings.folder, console)


def _handover(settings: HandoverSettings, console: Console) -> int:
    from pipeline.export.write import export_files, write_files

    [comparison] = load_single("handover", settings.config, {}).comparisons
    files = export_files(comparison.variants[0].experiment)
    write_files(files, settings.output)
    console.print(f"written to {settings.output}: {', '.join(files)}", highlight=False, soft_wrap=True)
    return 0


def _sync(settings: SyncSettings, console: Console) -> int:
    from pipeline.tracking.sync import sync

    complete = True
    for report in sync(settings.output):
        console.print(report.text, highlight=False, soft_wrap=True)
        complete = complete and report.is_complete
    if complete:
        console.print(f"nothing below {settings.output} is left to send", highlight=False)
    return 0 if complete else 1


TOOLS: dict[str, type[Settings]] = {
    "compare": CompareSettings,
    "handover": HandoverSettings,
    "report": ReportSettings,
    "sync": SyncSettings,
}
"""Their settings."""
USES: dict[str, Callable[[Any, Console], int]] = {
    "compare": _compare,
    "handover": _handover,
    "report": _report,
    "sync": _sync,
}
