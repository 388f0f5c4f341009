"""The time of the default search on a CPU, from start to answer, and the part of it that is not measuring.

    python benchmarks/search_cpu.py --runs 3      writes benchmarks/search_cpu_<date>.md

Every search starts with an empty study and an empty cache of predictions; the text is prepared before.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from checkout import ROOT, environment_of

from pipeline.runtime.environment import environment

FOLDER = Path(__file__).parent
SHOWN = ("device_name", "cores", "host_memory_mib", "system", "python", "torch", "transformers", "mlflow", "optuna")


def search(cache: Path) -> dict[str, Any]:
    """Run the default search in a folder of its own; return its seconds and their parts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "experiments").symlink_to(ROOT / "experiments")
        words = [sys.executable, "-m", "fitproof", "search"]
        for kept in cache.glob("prediction-*"):
            kept.unlink()
        start = time.perf_counter()
        variables = environment_of(folder) | {"FITPROOF_CACHE": str(cache)}
        subprocess.run(words, cwd=folder, env=variables, check=True, capture_output=True)
        seconds = time.perf_counter() - start
        [job] = (folder / "runs").glob("*-search-*")
        found = json.loads((job / "findings.json").read_text())
        verified = found["verification"]["seconds_measured"]
        return {
            "seconds": seconds,
            "trials": len(found["rows"]),
            "configurations": found["num_configurations"],
            "seconds of trials": found["certificate"]["seconds_measured"],
            "seconds of verification": verified,
            "not measuring": 1 - (found["certificate"]["seconds_measured"] + verified) / seconds,
            "over budget": sum(not row["fits"] for row in found["rows"]),
            "bound": found["certificate"]["bound"],
            "answer": ", ".join(str(value) for value in found["verification"]["answer"]["choice"].values()),
        }


def page(rows: list[dict[str, Any]], date: str) -> str:
    """Return the table as Markdown."""
    about = environment(torch.device("cpu"))
    forms = {"not measuring": "{:.1%}", "bound": "{:.2%}"}
    lines = [
        "| "
        + " | ".join(forms.get(k, "{:.1f}" if isinstance(v, float) else "{}").format(v) for k, v in row.items())
        + " |"
        for row in rows
    ]
    return "\n".join(
        [
            f"# The default search, cpu, {date}",
            "",
            f"Written by `python benchmarks/search_cpu.py --runs {len(rows)}`; `python -m fitproof search`, from its "
            "start to its end, with nothing in its study and no prediction in its cache.",
            "",
            "| what | value |",
            "|---|---|",
            *(f"| {name} | {about[name]} |" for name in SHOWN if name in about),
            f"| threads | {torch.get_num_threads()} |",
            "",
            f"Median {statistics.median(row['seconds'] for row in rows):.1f} s, of which "
            f"{statistics.median(row['not measuring'] for row in rows):.1%} is not training.",
            "",
            f"| {' | '.join(rows[0])} |",
            f"|{'---|' * len(rows[0])}",
            *lines,
            "",
        ]
    )


def main() -> None:
    """Search a few times, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        search(Path(name))  # prepares the text
        rows = [search(Path(name)) for _ in range(given.runs)]
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    (FOLDER / f"search_cpu_{date}.md").write_text(page(rows, date))
    print(page(rows, date), file=sys.stderr)


if __name__ == "__main__":
    main()
