"""The same training in Fitproof, a bare PyTorch loop, Hugging Face's Trainer, Accelerate and Lightning, side by side.

    python benchmarks/peers.py                       writes benchmarks/peers_<device>_<date>.csv, .md and .png
    python benchmarks/peers.py --device cpu --tiny   the same on a tiny model, to try the script, in a minute

Rounds of one run each, in random order, each run in a process of its own (benchmarks/peer_run.py). Every run is added
to the .csv as it ends; the same command resumes an interrupted one.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from exit_code import Deadline, exit_code_of, files_parser
from journal import Journal
from peer_run import BARE, PEERS, run
from peers_cases import CONFIGURATIONS, FRAMEWORKS, MODELS, Case, about_machine, cases_of, conditions_of, schedule
from peers_page import page
from peers_picture import plot

from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome
from pipeline.memory.device import find_device

SUBJECT = ("model", "configuration")
"""Columns that say what is compared."""
COLUMNS = (
    *SUBJECT,
    "round",
    "peer",
    "outcome",
    "seconds_per_step",
    "tokens_per_second",
    "peak_allocated_mib",
    "first_mean_of_means",
    "losses",
    "seconds",
    "tokens",
    "targets",
    "detail",
)


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is not measured yet, write the page; return the exit code, as exit_code_of() does."""
    given = _parser().parse_args(words)
    return exit_code_of(lambda: _run(given))


def _parser() -> argparse.ArgumentParser:
    parser = files_parser(__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", help="with commas between; by default gpt2-nano on a CPU, gpt2 and gpt2-medium")
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS), help="with commas between")
    parser.add_argument("--peers", default=",".join(PEERS), help="with commas between; the bare loop always")
    parser.add_argument("--runs", type=int, default=5, help="of each peer in each configuration")
    parser.add_argument("--num_steps", type=int, default=20)
    parser.add_argument("--minutes", type=float, help="begin no run after this many minutes")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this script out")
    return parser


def _run(given: argparse.Namespace) -> int:
    if given.runs < 1:
        raise InvalidInputError(f"runs must be 1 or more, and is {given.runs}; leave it out for 5")
    deadline = Deadline(given.minutes)
    peers = [peer for peer in PEERS if peer in {BARE, *chosen("peer", given.peers, PEERS)}]
    device = find_device(given.device)
    models = given.models.split(",") if given.models else MODELS[device.type]
    configurations = chosen("configuration", given.configurations, list(CONFIGURATIONS))
    cases = cases_of(device, models, configurations, given.num_steps, given.tiny)
    check_machine(device)
    about = about_machine(device)
    name = f"peers_{'tiny_' if given.tiny else ''}{device.type}_{given.date}"
    journal = Journal.open(given.folder / f"{name}.csv", COLUMNS, SUBJECT, conditions_of(cases, about))
    num_left = measure_all(journal, list(schedule(cases, peers, given.runs)), deadline)
    command = " ".join(["python", "benchmarks/peers.py", *sys.argv[1:]])
    experiments = {(case.model, case.configuration): case.experiment for case in cases}
    title = f"The same training in Fitproof and its peers, {device.type}, {given.date}"
    text = page(journal.rows(), experiments, about, title, command, num_left)
    (given.folder / f"{name}.md").write_text(text)
    if len({row["peer"] for row in journal.rows()}) > 1:  # else there is nothing to compare
        (given.folder / f"{name}.png").write_bytes(plot(journal.rows(), list(experiments), about["device_name"]))
    print(text)
    return num_left


def measure_all(journal: Journal, runs: Sequence[tuple[int, Case, str]], deadline: Deadline) -> int:
    """Measure the runs that the journal lacks until the time is over; return how many are left.

    Raises:
        KeyboardInterrupt: Ctrl-C ended a run; those before it are in the journal.

    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the check must not initialize CUDA before forks
    done = {(row["model"], row["configuration"], row["round"], row["peer"]) for row in journal.rows()}
    waiting = [run for run in runs if (run[1].model, run[1].configuration, str(run[0]), run[2]) not in done]
    while waiting and not deadline.is_over:
        number, case, peer = waiting.pop(0)
        row = measured(case, peer)
        if row["outcome"] == Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        journal.add({"model": case.model, "configuration": case.configuration, "round": number, "peer": peer, **row})
        print(f"{case.model} {case.configuration}, {peer}: {as_text(row)}; left: {len(waiting)}", flush=True)
    return len(waiting)


def chosen(what: str, text: str, valid: Sequence[str]) -> list[str]:
    """Return the names in `text`, in the order of `valid`; raise InvalidInputError for an unknown one."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in valid:
            raise InvalidInputError(f"no {what} is called {name!r}; the {what}s are {', '.join(valid)}")
    return [name for name in valid if name in names]


def check_machine(device: torch.device) -> None:
    """Raise InvalidInputError if a framework is not installed, or would train on several GPUs."""
    absent = [name for name in FRAMEWORKS if find_spec(name) is None]
    if absent:
        raise InvalidInputError(
            f"the peers must be installed, and {', '.join(absent)} is not; pip install '.[peers]' in the checkout"
        )
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        raise InvalidInputError(
            f"the peers must see one GPU, or Trainer takes all, and {torch.cuda.device_count()} are here; "
            "set CUDA_VISIBLE_DEVICES=0"
        )


def measured(case: Case, peer: str) -> dict[str, Any]:
    """Run it; return the columns of what it measured."""
    with tempfile.TemporaryDirectory() as folder:
        result, shown = run(peer, case.experiment, Path(folder) / "log.txt")
    row: dict[str, Any] = {"outcome": str(result.outcome), "detail": (result.detail or "").replace("\n", " ")}
    if shown is None:
        return row
    assert result.memory is not None and result.memory.peak_allocated_bytes is not None
    left_out = case.experiment.settings.timing_warmup_steps
    seconds = statistics.median(shown.seconds[left_out - 1 :])  # the first step has no time
    return {
        **row,
        "seconds_per_step": round(seconds, 6),
        "tokens_per_second": round(statistics.fmean(shown.tokens[left_out:]) / seconds, 1),
        "peak_allocated_mib": round(result.memory.peak_allocated_bytes / 2**20, 3),
        "first_mean_of_means": shown.first_mean_of_means,
        "losses": " ".join(f"{loss:.6f}" for loss in shown.losses),
        "seconds": " ".join(f"{value:.6f}" for value in shown.seconds),
        "tokens": " ".join(map(str, shown.tokens)),
        "targets": " ".join(map(str, shown.targets)),
    }


def as_text(row: Mapping[str, Any]) -> str:
    """Return a run's metrics as text."""
    if "seconds_per_step" not in row:
        return f"{row['outcome']}: {row['detail']}"
    return f"{row['seconds_per_step']:.4f} s/step, {row['peak_allocated_mib']:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
