"""`fitproof export`: a configuration as files for other frameworks."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pipeline.base.settings import Settings
from pipeline.config.entry_points import BEST_FILE
from pipeline.config.variants import load_single
from pipeline.export.write import TargetFiles, files_by_target, write_files
from pipeline.jobs.plan_settings import target_of
from pipeline.jobs.publish import show
from pipeline.report.page import Report, Section
from pipeline.report.shown import Shown
from pipeline.report.table import Table


class ExportSettings(Settings):
    """The settings of `export`."""

    config: Path = BEST_FILE
    """The YAML file to export: best.yaml of a search, or the config.yaml of any run."""
    output: Path = Path("export")
    """Folder of the files for other frameworks."""
    gpu: str | None = None
    """Card of the machine that trains, as h100; none: it is this machine, and has the configuration's device."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Exported(Shown):
    """The files that train a configuration in other frameworks."""

    config: Path
    output: Path
    """The folder in which they are."""
    targets: tuple[TargetFiles, ...]

    @property
    def files(self) -> dict[str, str]:
        """The texts by file name."""
        return {name: text for target in self.targets for name, text in target.texts.items()}

    @property
    def _report(self) -> Report:
        lines = [
            {"files": ", ".join(one.texts), "use": one.purpose, "cannot express": " ".join(one.missing)}
            for one in self.targets
        ]
        table = Table.of("files", "files and frameworks", lines, num_in_terminal=0)
        return Report(
            entry="export",
            question=f"Which files train {self.config} in other frameworks?",
            answer=f"{len(self.files)} files are in {self.output}; README.md there says how each is used, and what it "
            f"cannot express: {', '.join(self.files)}.",
            sections=(Section(title=table.title, tables=(table,)),),
            environment={},
            settings={},
        )


def export(settings: ExportSettings, console: Console) -> int:
    """Write the files, print what they are, and return the exit code 0."""
    show(write_export(settings)._report, console)
    return 0


def write_export(settings: ExportSettings) -> Exported:
    """Write the files, and return them.

    Raises:
        InvalidInputError: the configuration is wrong, the card cannot run it, or the folder cannot be written.

    """
    target = None if settings.gpu is None else target_of(settings.gpu)
    [variant] = load_single("export", {"config": settings.config}, target).variants
    experiment = variant.experiment if target is None else variant.experiment.on_device(target.kind)
    found = Exported(config=settings.config, output=settings.output, targets=files_by_target(experiment))
    write_files(found.files, settings.output)
    return found
