"""How long after its start each entry point and tool prints its first line, and its second.

    python benchmarks/first_line.py            writes benchmarks/first_line_<date>.md

Each is started as a user starts it, without a terminal, and killed once both lines are there. The first says what is
done; the second is progress, the answer or, of a tool that finds nothing in an empty folder, what is missing.
"""

import contextlib
import datetime
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from checkout import BINARIES, ROOT, environment_of
from entry_points import SHOWN

from pipeline.config.entry_points import TOOLS, entry_points
from pipeline.runtime.environment import environment

NUM_RUNS = 3
NUM_LINES = 2
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB"
COMMANDS = {
    **{name: (name,) for name in (*entry_points(), *TOOLS)},
    "plan": ("plan", "--model", "gpt2", "--gpu", "t4"),
    "finetune --gpu": ("finetune", "--model", "qwen3-8b", "--gpu", "rtx4090"),
    "simulate": ("simulate", "--gpu", "t4", "--", str(BINARIES / "python"), "-c", "import torch"),
    "check": ("check", "--gpu", "t4", "--max_reserved", "8GiB", "--", str(BINARIES / "python"), "-c", "import torch"),
    "explain": ("explain", MESSAGE),
    "compare": ("compare", "--runs", "a,b"),
    "--help": ("--help",),
}
"""What is typed behind `fitproof`."""


def main() -> None:
    """Start all, write the page."""
    about, date = environment(torch.device("cpu")), f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    load = os.getloadavg()[0]
    rows = []
    for name, words in COMMANDS.items():
        runs = [seconds_to_lines(words) for _ in range(NUM_RUNS)]
        medians = [statistics.median(run[place] for run in runs) for place in range(min(map(len, runs)))]
        shown = [f"{median:.2f}" for median in medians] + [""] * (NUM_LINES - len(medians))
        rows.append(f"| `{name}` | {' | '.join(shown)} |")
        print(rows[-1], flush=True)
    page = [
        f"# Seconds to the first lines of a command, {date}",
        "",
        f"Written by `python benchmarks/first_line.py`: medians of {NUM_RUNS} runs; load average {load:.1f} before.",
        "",
        "| what | value |",
        "|---|---|",
        *(f"| {name} | {about[name]} |" for name in SHOWN if name in about),
        "",
        "| command | first line | second line |",
        "|---|---:|---:|",
        *rows,
        "",
    ]
    (ROOT / "benchmarks" / f"first_line_{date}.md").write_text("\n".join(page))


def seconds_to_lines(words: tuple[str, ...]) -> list[float]:
    """Return how long after its start the command has printed its first lines; fewer where it prints fewer."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "fitproof", *words],
            cwd=folder,
            env=environment_of(Path(folder)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        seconds = [time.monotonic() - start for _, _ in zip(range(NUM_LINES), process.stdout, strict=False)]
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        return seconds


if __name__ == "__main__":
    main()
