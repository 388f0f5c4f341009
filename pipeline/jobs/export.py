"""`fitproof export`: a configuration as files for other frameworks."""

from pathlib import Path

from rich.console import Console

from pipeline.base.contracts import Settings
from pipeline.config.entry_points import BEST_FILE
from pipeline.config.variants import load_single
from pipeline.jobs.policies import with_policies


class ExportSettings(Settings):
    """The settings of `export`."""

    config: Path = BEST_FILE
    """The YAML file to export: best.yaml of a search, or the config.yaml of any run."""
    output: Path = Path("export")
    """Folder of the files for other frameworks."""


def export(settings: ExportSettings, console: Console) -> int:
    """Write the files and return the exit code 0.

    Raises:
        InvalidInputError: the configuration is wrong, or the folder cannot be written.

    """
    from pipeline.export.write import export_files, write_files

    [variant] = with_policies(load_single("export", settings.config, {})).variants
    files = export_files(variant.experiment)
    write_files(files, settings.output)
    console.print(f"written to {settings.output}: {', '.join(files)}", highlight=False, soft_wrap=True)
    return 0
