"""How long every entry point takes at its defaults, from `mlflow run` to its end, and what it prints.

    python benchmarks/entry_points.py            writes benchmarks/entry_points_<device>_<date>.md

Each runs in a folder of its own with an empty tracking store; the tables are those that a user sees.
"""

import datetime
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipeline.config.entry_points import entry_points
from pipeline.memory.device import find_device
from pipeline.runtime.environment import environment

ROOT = Path(__file__).parent.parent
SHOWN = (
    "device_name",
    "cores",
    "host_memory_mib",
    "system",
    "python",
    "torch",
    "transformers",
    "mlflow",
    "optuna",
    "cuda",
)


def main() -> None:
    """Run all, write the page."""
    device = find_device("auto")
    about = environment(device)
    lines = [
        f"# Entry points at their defaults, {device.type}, {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
        "",
        "Written by `python benchmarks/entry_points.py`; one run each.",
        "",
        "| what | value |",
        "|---|---|",
        *(f"| {name} | {about[name]} |" for name in SHOWN if name in about),
        "",
    ]
    rows, outputs = ["| entry point | seconds | exit code |", "|---|---:|---:|"], []
    for entry in entry_points():
        seconds, code, output = run(entry)
        print(f"{entry}: {seconds:.0f} s", flush=True)
        rows.append(f"| {entry} | {seconds:.0f} | {code} |")
        outputs += [f"## {entry}", "```", *(line.rstrip() for line in output.splitlines()), "```", ""]
    page = ROOT / "benchmarks" / f"entry_points_{device.type}_{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}.md"
    page.write_text("\n".join([*lines, *rows, "", *outputs]))


def run(entry: str) -> tuple[float, int, str]:
    """Return (seconds, exit code, what it printed) of one entry point."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{folder}/mlflow.db"
        words = ["mlflow", "run", str(ROOT), "-e", entry, "--env-manager=local", "-P", f"output={folder}/runs"]
        if entry == "search":
            words += ["-P", f"storage=sqlite:///{folder}/optuna.db"]
        binaries = Path(sys.executable).parent
        start = time.monotonic()
        done = subprocess.run(
            [str(binaries / words[0]), *words[1:]],
            env={"PATH": f"{binaries}:/usr/bin:/bin", "HOME": str(Path.home()), "MLFLOW_TRACKING_URI": store},
            capture_output=True,
            text=True,
            check=False,
        )
        kept = [line for line in done.stdout.splitlines() if not line.startswith("results: ")]
        return time.monotonic() - start, done.returncode, "\n".join(kept).strip()


if __name__ == "__main__":
    main()
