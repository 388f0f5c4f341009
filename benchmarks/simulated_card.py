"""A process that predicts and trains configurations on a simulated card of .venv-cuda (make .venv-cuda/installed)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
sys.path.insert(0, str(ROOT / "tests" / "cuda_without_gpu"))
from cards import PYTHON, environment_of  # noqa: E402

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
QUANTITIES = ("allocated", "reserved")
Row = dict[str, str]


class SimulatedCard:
    """A process that predicts and runs configurations on one card, with one configuration of its allocator."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, **task: Any) -> dict[str, Any]:
        """Return the answer to a task of simulated_run.py.

        Raises:
            RuntimeError: the process ended, or the task failed.

        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "the process of the simulated card ended"}
        if "error" in reply:
            raise RuntimeError(f"{task}: {reply['error']}")
        return reply


@contextmanager
def simulated_card(card: str, *, expandable_segments: bool) -> Iterator[SimulatedCard]:
    """Start the process of a card, and end it afterwards."""
    base = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    variables = {**base, **environment_of(card, base=base)}
    variables |= EXPANDABLE if expandable_segments else {}
    command = [str(PYTHON), str(FOLDER / "simulated_run.py")]
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield SimulatedCard(process)
        assert process.stdin is not None
        process.stdin.close()
