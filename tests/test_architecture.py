"""The layers of docs/architecture.md, as pyproject.toml has import-linter check them."""

import subprocess
import sys
from pathlib import Path

from conftest import ROOT


def test_imports_follow_the_layers() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
