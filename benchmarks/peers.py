"""The same training in Headroom, a bare PyTorch loop, Hugging Face's Trainer, Accelerate and Lightning, side by side.

    python benchmarks/peers.py                       writes benchmarks/peers_<device>_<date>.csv, .md and .png
    python benchmarks/peers.py --device cpu --tiny   the same on a model too small to say anything, in a minute

Rounds of one run each, in random order, each run in a process of its own (benchmarks/peer_run.py). Every run is added
to the .csv as it ends; the same command goes on where an interrupted one has stopped.
"""

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from journal import Journal
from overhead import TINY
from peer_run import BARE, PEERS, run
from peers_page import FRAMEWORKS, page
from peers_picture import picture
from processes import ROOT

from pipeline.cli import INTERRUPTED
from pipeline.contracts import InvalidInputError, Outcome
from pipeline.environment import environment
from pipeline.experiment import Experiment, make_experiment
from pipeline.memory.device import find_device
from pipeline.settings import nested

MODELS = {"cpu": ("gpt2-nano",), "cuda": ("gpt2", "gpt2-medium")}
LENGTHS = {"cpu": 256, "cuda": 512}
"""Tokens in a sequence."""
TINY_LENGTH = 128
"""That of the tiny form: some of the corpus's documents are shorter, and padded."""
ALIKE = {"eval_steps": 0, "causal_lm.dropout": 0.0}
"""Settings of every run."""
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "fp32": {"micro_batch_size": 8},
    "bf16_checkpointed": {
        "precision": "bf16",
        "micro_batch_size": 2,
        "accumulation_steps": 4,
        "checkpointing": "every_layer",
    },
    "padded": {"sequences": "padded", "micro_batch_size": 2, "accumulation_steps": 4},
}
CUDA_MICRO_BATCH_SIZE = 8
"""Sequences in a forward pass on a GPU, in all configurations."""


@dataclass(frozen=True)
class Case:
    """A model in a configuration."""

    model: str
    configuration: str
    experiment: Experiment


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is not measured yet, write the page; return the exit code: 0, 2 invalid input, 130 interrupted."""
    try:
        return _run(_parser().parse_args(words))
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept, and the same command goes on", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", help="with commas between; by default gpt2-nano on a CPU, gpt2 and gpt2-medium")
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS), help="with commas between")
    parser.add_argument("--peers", default=",".join(PEERS), help="with commas between; the bare loop always")
    parser.add_argument("--runs", type=int, default=5, help="of each peer in each configuration")
    parser.add_argument("--num_steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, help="after which no further run is started; the same command goes on")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this script out")
    parser.add_argument("--date", default=f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}", help="of the files")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks", help="where the files are written")
    return parser


def _run(given: argparse.Namespace) -> int:
    if given.runs < 1:
        raise InvalidInputError(f"runs must be 1 or more, and is {given.runs}; leave it out for 5")
    peers = [peer for peer in PEERS if peer in {BARE, *chosen("peer", given.peers, PEERS)}]
    cases = cases_of(given)
    check_frameworks()
    device = cases[0].experiment.device
    about = {**environment(device), **{name: version(name) for name in FRAMEWORKS}}
    name = f"peers_{'tiny_' if given.tiny else ''}{device.type}_{given.date}"
    journal = Journal.open(given.folder / f"{name}.csv", conditions_of(cases, about))
    num_left = measure_all(journal, list(schedule(cases, peers, given.runs)), given.seconds or math.inf)
    command = " ".join(["python", "benchmarks/peers.py", *sys.argv[1:]])
    experiments = {(case.model, case.configuration): case.experiment for case in cases}
    title = f"The same training in Headroom and its peers, {device.type}, {given.date}"
    text = page(journal.rows(), experiments, about, title, command, num_left)
    (given.folder / f"{name}.md").write_text(text)
    (given.folder / f"{name}.png").write_bytes(picture(journal.rows(), list(experiments), about["device_name"]))
    print(text)
    return 0


def measure_all(journal: Journal, runs: Sequence[tuple[int, Case, str]], seconds_limit: float) -> int:
    """Measure the runs that the journal lacks until the time is over; return how many are left.

    Raises:
        KeyboardInterrupt: Ctrl-C ended a run; those before it are in the journal.

    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # looking for a GPU must not hinder the forked runs
    end = time.monotonic() + seconds_limit
    done = {(row["model"], row["configuration"], row["round"], row["peer"]) for row in journal.rows()}
    waiting = [run for run in runs if (run[1].model, run[1].configuration, str(run[0]), run[2]) not in done]
    while waiting and time.monotonic() < end:
        number, case, peer = waiting.pop(0)
        row = measured(case, peer)
        if row["outcome"] == Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        journal.add({"model": case.model, "configuration": case.configuration, "round": number, "peer": peer, **row})
        print(f"{case.model} {case.configuration}, {peer}: {told(row)}; left: {len(waiting)}", flush=True)
    return len(waiting)


def chosen(what: str, text: str, valid: Sequence[str]) -> list[str]:
    """Return the names in `text`, in the order of `valid`; raise InvalidInputError for one that is not there."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in valid:
            raise InvalidInputError(f"no {what} is called {name!r}; the {what}s are {', '.join(valid)}")
    return [name for name in valid if name in names]


def cases_of(given: argparse.Namespace) -> list[Case]:
    """Return the cases that were asked for, each checked, its corpus included."""
    device = find_device(given.device)
    models = given.models.split(",") if given.models else MODELS[device.type]
    common = {**ALIKE, "device": str(device), "num_steps": given.num_steps, "sequence_length": LENGTHS[device.type]}
    if given.tiny:
        common |= {**TINY, "sequence_length": TINY_LENGTH}
    cases = []
    for model in models:
        for name in chosen("configuration", given.configurations, list(CONFIGURATIONS)):
            settings = {**common, "model": model, **CONFIGURATIONS[name]}
            if device.type == "cuda":
                settings["micro_batch_size"] = CUDA_MICRO_BATCH_SIZE
            experiment = make_experiment(nested(settings), "main")
            reason = experiment.unsupported()
            if reason:
                raise InvalidInputError(f"{reason}; leave {name} out with --configurations")
            experiment.prepare()
            cases.append(Case(model, name, experiment))
    return cases


def check_frameworks() -> None:
    """Raise InvalidInputError where a framework is not installed."""
    absent = [name for name in FRAMEWORKS if find_spec(name) is None]
    if absent:
        raise InvalidInputError(
            f"the peers must be installed, and {', '.join(absent)} is not; pip install 'headroom[peers]'"
        )


def conditions_of(cases: Sequence[Case], about: Mapping[str, str]) -> dict[str, str]:
    """Return, by a case's name, all that its figures depend on; runs under other conditions do not compare."""
    versions = {name: about[name] for name in ("device_name", "python", "torch", "transformers", *FRAMEWORKS)}
    return {
        f"{case.model} {case.configuration}": json.dumps(
            {**case.experiment.params(), **versions, "output": ""}, sort_keys=True
        )
        for case in cases
    }


def schedule(cases: Sequence[Case], peers: Sequence[str], num_runs: int) -> Iterator[tuple[int, Case, str]]:
    """Yield (round, case, peer): in a round each case once in random order, and in a case each peer."""
    for number in range(num_runs):
        random = np.random.default_rng(number)
        for index in random.permutation(len(cases)):
            for peer in random.permutation(list(peers)):
                yield number, cases[index], str(peer)


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


def told(row: Mapping[str, Any]) -> str:
    """Return a run's figures in a few words."""
    if "seconds_per_step" not in row:
        return f"{row['outcome']}: {row['detail']}"
    return f"{row['seconds_per_step']:.4f} s/step, {row['peak_allocated_mib']:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
