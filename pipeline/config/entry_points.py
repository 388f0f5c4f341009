"""The names of the entry points, known without loading what they do."""

from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "experiments"
"""The entry points' YAML files."""
SINGLE = ("main", "profiling")
"""Entry points that run the one configuration of the file `config`."""


def entry_points() -> list[str]:
    """Return the names of all entry points: those of one configuration, and each file of experiments/."""
    return [*SINGLE, *sorted(file.stem for file in FOLDER.glob("*.yaml"))]
