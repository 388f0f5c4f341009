"""The files of one run on local disk: configuration, optimizer steps and result."""

import json
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import write_atomically
from pipeline.base.results import Result, StepRecord
from pipeline.runtime.observer import Observer, Run
from pipeline.training.metrics import Summary, finite, step_metrics

CONFIG, STEPS, RESULT, LOG = "config.yaml", "steps.jsonl", "result.json", "log.txt"
"""File names in a run's folder; LOG is what the run's process printed."""


def folder_name(name: str) -> str:
    """Return the name of the folder of a run of this name, which has neither spaces nor colons nor commas."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-")


class RunFolder(Observer):
    """Writes the files of one run; optimizer steps reach the operating system one by one, so they outlive a kill."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._has_failed = False

    def write_config(self) -> None:
        """Make the folder and write the configuration.

        Raises:
            InvalidInputError: the folder cannot be written.

        """
        write_result_file(self._run.folder / CONFIG, self._run.runnable.to_yaml())

    def step(self, record: StepRecord) -> None:
        """Append the metrics of one optimizer step; a full disk is reported once and does not stop the training."""
        line = {"step": record.step, "time": milliseconds_now(), "values": step_metrics(record)}
        path = self._run.folder / STEPS
        try:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                print(f"{path} cannot be written ({error.strerror}); training continues", file=sys.stderr)  # noqa: T201

    def write_result(self, result: Result, summary: Summary) -> None:
        """Write settings, summary metrics, optimizer steps and outcome.

        Raises:
            InvalidInputError: the folder cannot be written.

        """
        settings = self._run.runnable.params()
        content = finite({"settings": settings, "metrics": summary.metrics, "result": asdict(result)})
        write_result_file(self._run.folder / RESULT, json.dumps(content, indent=1))


def write_result_file(path: Path, content: str | bytes) -> None:
    """Write a file of a job's results atomically.

    Raises:
        InvalidInputError: it cannot be written.

    """
    try:
        write_atomically(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidInputError(
            f"the output folder must be writable, and {path} cannot be written ({error.strerror}); free some "
            "space, or set output to another folder"
        ) from error


def read_steps(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the optimizer steps of steps.jsonl from byte `start` on, and the byte after the last complete line.

    A line that cannot be read, as a full disk or a kill may leave it, is skipped.
    """
    if not path.exists():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        content = file.read()
    end = content.rfind(b"\n") + 1
    lines = []
    for line in content[:end].splitlines():
        try:
            read = json.loads(line)
            lines.append({"step": int(read["step"]), "time": int(read["time"]), "values": dict(read["values"])})
        except (ValueError, TypeError, KeyError):
            continue
    return lines, start + end


def milliseconds_now() -> int:
    """Return the time in milliseconds since 1970, as MLflow counts it."""
    return int(time.time() * 1000)
