"""The processes that benchmarks start: with this one's Python and packages, and a tracking store of their own."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BINARIES = Path(sys.executable).parent


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment variables of a process whose tracking store is a new one in `folder`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return {
        **inherited,
        "PATH": f"{BINARIES}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
    }
