"""How long `mlflow run . -e main` takes to its first optimizer step, stage by stage, as seen from outside."""

import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from checkout import BINARIES, ROOT, environment_of

from pipeline.runtime.run_folder import LOG, STEPS

STAGES = {
    "command starts": "`mlflow run` has started `python -m fitproof main`",
    "imports done": "what is needed is imported, the settings are checked, and the job's folder is made",
    "process started": "the process that trains runs and has its log",
    "first step done": "the first optimizer step's record is on disk",
    "training done": "the result is on disk",
    "end": "the report is made, all has reached MLflow, and `mlflow run` has ended",
}
"""Each stage and what has happened when it is reached."""
SECONDS_BETWEEN_LOOKS = 0.005


def start_up(settings: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds from `mlflow run` to each stage of a run with these settings and an empty tracking store."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = [f"{name}={value}" for name, value in {**settings, "output": str(folder / "runs")}.items()]
        words = ["mlflow", "run", str(ROOT), "-e", "main", "--env-manager=local"]
        start = time.monotonic()
        process = subprocess.Popen(
            [str(BINARIES / words[0]), *words[1:], *(word for given in parameters for word in ("-P", given))],
            env=environment_of(folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        reached: dict[str, float] = {}
        waiting = [stage for stage in STAGES if stage != "end"]
        while process.poll() is None:
            if waiting and _is_reached(waiting[0], process.pid, folder / "runs"):
                reached[waiting.pop(0)] = time.monotonic() - start
            else:
                time.sleep(SECONDS_BETWEEN_LOOKS)
        reached["end"] = time.monotonic() - start
        if process.returncode or waiting:
            raise RuntimeError(f"mlflow run must succeed, and gave exit code {process.returncode}; run it to see why")
        return reached


def _is_reached(stage: str, pid: int, output: Path) -> bool:
    match stage:
        case "command starts":
            return any(_is_our_command(process) for process in psutil.Process(pid).children(recursive=True))
        case "imports done":
            return any(output.glob("*"))
        case "process started":
            return any(output.glob(f"*/*/{LOG}"))
        case "first step done":
            return any(file.stat().st_size for file in output.glob(f"*/*/{STEPS}"))
        case _:
            return any(output.glob("*/*/result.json"))


def _is_our_command(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[1:3] == ["-m", "fitproof"]
    except psutil.Error:
        return False
