"""`python -m fitproof ENTRY ...`, which is `fitproof ENTRY ...` as well."""

import sys
from pathlib import Path

from pipeline.__main__ import run

__all__ = ["run"]

if __name__ == "__main__":
    if sys.path[0] != str(Path(__file__).parent.parent):
        sys.path.append(sys.path.pop(0))  # the current folder, which may have a pipeline/ that is not Fitproof's
    run()
