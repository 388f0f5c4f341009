"""The overhead of `main` over the same training as a bare PyTorch loop, and the start-up time of `main`.

    python benchmarks/overhead.py            writes benchmarks/overhead_<device>_<date>.md

A pair is one run of each (benchmarks/bare.py is the other one), in random order, each in a process of its own, with
the same settings, sequences and losses.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from checkout import ROOT, environment_of
from entry_points import SHOWN
from start_up import STAGES, start_up

from pipeline.config.settings import RunSettings
from pipeline.memory.device import find_device
from pipeline.runtime.environment import environment

TINY = {
    "sequence_length": "32",
    "vocabulary_size": "512",
    "causal_lm.num_layers": "2",
    "causal_lm.width": "32",
    "causal_lm.num_heads": "2",
}
"""Settings to try out this script; their results mean nothing."""
LARGEST_LOSS_DIFFERENCE = 1e-4
"""Between the losses of the two sides' same step: more, and they do not train the same."""
FIRST_STEPS = int(RunSettings.model_fields["timing_warmup_steps"].default)
"""Optimizer steps that the time per step leaves out."""


@dataclass(frozen=True)
class Side:
    """One run of the entry point or of the bare loop."""

    losses: Sequence[float]
    seconds: Sequence[float]
    """Of every optimizer step."""
    peak_allocated_bytes: int


@dataclass(frozen=True)
class Pair:
    """One run of each, one after the other."""

    entry_point: Side
    bare: Side


FIGURES: dict[str, tuple[Callable[[Side], float], str]] = {
    "seconds per step, median of a run": (lambda side: statistics.median(side.seconds[FIRST_STEPS:]), "1.01"),
    "seconds per step, mean of a run": (lambda side: statistics.fmean(side.seconds[FIRST_STEPS:]), ""),
    "peak allocated, MiB": (lambda side: side.peak_allocated_bytes / 2**20, "1.001"),
}
"""What is compared, and the greatest ratio that is aimed at."""


def main() -> None:
    """Run all, write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--num_steps", type=int, default=40)
    parser.add_argument("--starts", type=int, default=5, help="runs whose start-up is timed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this script out")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks", help="where the page is written")
    given = parser.parse_args()
    device = find_device(given.device)
    settings = {"device": str(device), "num_steps": str(given.num_steps), **(TINY if given.tiny else {})}
    pairs = run_pairs(settings, given.pairs)
    starts = [start_up(settings) for _ in range(given.starts)]
    today = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    about = environment(device)
    lines = [
        f"# What it costs to be watched, {device.type}, {today}",
        "",
        f"Written by `python benchmarks/overhead.py`; settings: {json.dumps(settings)}.",
        "",
        *table(("what", "value"), [(name, about[name]) for name in SHOWN if name in about]),
        *of_pairs(pairs),
        *of_starts(starts),
    ]
    text = "\n".join(lines)
    print(text)
    (given.folder / f"overhead_{device.type}_{today}.md").write_text(text)


def run_pairs(settings: Mapping[str, str], num_pairs: int) -> list[Pair]:
    """Return what the pairs measured; a first run of the entry point, which fills caches, does not count."""
    random = np.random.default_rng(0)
    pairs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_entry_point(settings, folder / "first")
        (config,) = folder.glob("first/*/*/config.yaml")
        for number in range(num_pairs):
            runs: dict[str, Callable[[], Side]] = {
                "entry point": lambda number=number: run_entry_point(settings, folder / str(number)),
                "bare loop": lambda: run_bare(config),
            }
            sides = {name: runs[name]() for name in random.permutation(list(runs))}
            pairs.append(Pair(sides["entry point"], sides["bare loop"]))
            check_losses(pairs[-1])
            print(f"pair {number + 1} of {num_pairs}: {', '.join(as_text(sides))}", flush=True)
    return pairs


def run_entry_point(settings: Mapping[str, str], output: Path) -> Side:
    """Run `main` as a user does, and return what its result.json says."""
    output.mkdir()
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    call([sys.executable, "-m", "fitproof", "main", "--output", str(output), *words], output)
    (file,) = output.glob("*/*/result.json")
    result = json.loads(file.read_text())["result"]
    steps = result["steps"]
    return Side(
        losses=[step["loss"] for step in steps],
        seconds=[step["seconds"] for step in steps],
        peak_allocated_bytes=result["memory"]["peak_allocated_bytes"],
    )


def run_bare(config: Path) -> Side:
    """Run the bare loop, once for its time and once more for its memory."""
    words = [sys.executable, str(ROOT / "benchmarks" / "bare.py"), str(config)]
    timed, metered = (json.loads(call([*words, *more], config.parent)) for more in ([], ["--metered"]))
    return Side(timed["losses"], timed["seconds"], metered["peak_allocated_bytes"])


def call(words: Sequence[str], folder: Path) -> str:
    """Return what a command prints that must succeed; its tracking store is in `folder`."""
    done = subprocess.run(words, cwd=ROOT, env=environment_of(folder), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} must succeed, and gave exit code {done.returncode}:\n{done.stderr}")
    return done.stdout


def largest_loss_difference(pair: Pair) -> float:
    """Return the largest difference between the losses of the two sides' same step."""
    steps = zip(pair.entry_point.losses, pair.bare.losses, strict=True)
    return max(abs(one - other) for one, other in steps)


def check_losses(pair: Pair) -> None:
    """Raise RuntimeError if the two sides do not have the same losses."""
    difference = largest_loss_difference(pair)
    if not difference <= LARGEST_LOSS_DIFFERENCE:
        raise RuntimeError(f"both sides must train the same, and their losses differ by {difference:g}; fix bare.py")


def as_text(sides: Mapping[str, Side]) -> Iterator[str]:
    """Yield, for each side in the order of its run, its seconds per step."""
    return (f"{name} {statistics.median(side.seconds[FIRST_STEPS:]):.4f} s/step" for name, side in sides.items())


def of_pairs(pairs: Sequence[Pair]) -> list[str]:
    """Return the lines on what the pairs show."""
    rows = []
    for name, (figure, goal) in FIGURES.items():
        ratios = [figure(pair.entry_point) / figure(pair.bare) for pair in pairs]
        sides = ([pair.entry_point for pair in pairs], [pair.bare for pair in pairs])
        medians = [statistics.median(map(figure, runs)) for runs in sides]
        rows.append((name, goal, *spread(ratios), *(f"{median:.5g}" for median in medians)))
    figure = FIGURES["seconds per step, median of a run"][0]
    repeated = [figure(one.bare) / figure(other.bare) for one, other in pairwise(pairs)]
    if repeated:
        rows.append(("seconds per step, the bare loop over its next run", "", *spread(repeated), "", ""))
    heads = ("figure", "goal", "median ratio", "quartiles", "least to greatest", "entry point", "bare loop")
    return [
        "## Entry point over bare loop",
        "",
        f"{len(pairs)} pairs; the last row shows how far this machine repeats itself. Both sides took the same steps: "
        f"their losses differ by {max(map(largest_loss_difference, pairs)):.2g} at most.",
        "",
        *table(heads, rows),
    ]


def of_starts(starts: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the lines on how long `mlflow run . -e main` takes to each stage."""
    if not starts:
        return []
    rows = []
    for stage, meaning in STAGES.items():
        seconds = [start[stage] for start in starts]
        median = statistics.median(seconds)
        rows.append((stage, meaning, f"{median:.2f}", f"{min(seconds):.2f} to {max(seconds):.2f}"))
    heads = ("stage", "what has happened", "median seconds", "least to greatest")
    note = f"Seconds since `mlflow run . -e main`, {len(starts)} runs, each with an empty tracking store."
    return ["## Start-up", "", note, "", *table(heads, rows)]


def spread(ratios: Sequence[float]) -> tuple[str, str, str]:
    """Return median, quartiles and range as text."""
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return f"{median:.4f}", f"{low:.4f} to {high:.4f}", f"{min(ratios):.4f} to {max(ratios):.4f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a table in Markdown, and an empty one."""
    lines = [heads, ["---"] * len(heads), *rows]
    return [*(f"| {' | '.join(map(str, cells))} |" for cells in lines), ""]


if __name__ == "__main__":
    main()
