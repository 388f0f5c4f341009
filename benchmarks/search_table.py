"""Every configuration of a space measured, several times in random order: the table on which samplers are replayed.

    python benchmarks/search_table.py                     writes benchmarks/search_table_cpu_<date>.csv and .json
    python benchmarks/search_table.py --device cuda       the space of a GPU, with gpt2
    python benchmarks/search_table.py --tiny --output F   a space of four, to see that it works

A run is added to the file as it ends: the same command goes on where it was interrupted.
"""

import argparse
import csv
import datetime
import json
import random
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.environment import environment
from pipeline.execute import execute
from pipeline.experiment import Experiment, make_experiment
from pipeline.flops import sequence_flops
from pipeline.memory.device import hardware_of
from pipeline.predict import predict_all
from pipeline.settings import merged, nested
from pipeline.space import Space

FOLDER = Path(__file__).parent
COLUMNS = (
    "repeat",
    "micro_batch_size",
    "checkpointing",
    "precision",
    "outcome",
    "predicted_peak_bytes",
    "peak_bytes",
    "flops_per_sequence",
    "seconds_total",
    "seconds_of_steps",
)
POLICIES = ("none", "every_layer", "every_2_layers", "every_3_layers", "every_4_layers")
EVERY_WAY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)


@dataclass(frozen=True)
class Form:
    """A space and what all of its configurations share."""

    common: Mapping[str, Any]
    space: Space

    def experiment(self, choice: Mapping[str, Any]) -> Experiment:
        """Return the Experiment of a choice."""
        return make_experiment(merged(nested(self.common), nested(choice)), "search")


SHARED = {"eval_steps": 0, "num_steps": 10}
FORMS = {
    "cpu": Form(
        SHARED | {"device": "cpu", "model": "gpt2-nano", "sequence_length": 64, "effective_batch_size": 48},
        Space({"micro_batch_size": EVERY_WAY, "checkpointing": POLICIES, "precision": ("fp32", "bf16")}),
    ),
    "cuda": Form(
        SHARED | {"device": "cuda", "model": "gpt2", "sequence_length": 512, "effective_batch_size": 48},
        Space({"micro_batch_size": EVERY_WAY, "checkpointing": POLICIES, "precision": ("fp32", "bf16")}),
    ),
    "tiny": Form(
        SHARED
        | {"device": "cpu", "model": "gpt2-nano", "sequence_length": 32, "effective_batch_size": 4, "num_steps": 4},
        Space({"micro_batch_size": (2, 4), "checkpointing": ("none", "every_layer"), "precision": ("fp32",)}),
    ),
}


def measure(form: Form, output: Path, repeats: int) -> None:
    """Measure what the file has not got yet, in random order, each configuration as often as all others."""
    choices = form.space.choices
    experiments = [form.experiment(choice) for choice in choices]
    target = hardware_of(experiments[0].device)
    predicted = dict(predict_all(experiments, target))
    flops: dict[str, int] = {}
    order = [(repeat, number) for repeat in range(repeats) for number in range(len(choices))]
    shuffled = sorted(order, key=lambda pair: (pair[0], random.Random(repr(pair)).random()))  # noqa: S311
    done = _measured(output)
    for repeat, number in shuffled:
        choice, experiment = choices[number], experiments[number]
        if (str(repeat), *(str(value) for value in choice.values())) in done:
            continue
        policy = str({name: value for name, value in choice.items() if name != "micro_batch_size"})
        if policy not in flops:
            flops[policy] = sequence_flops(experiment, target)
        with tempfile.TemporaryDirectory() as folder:
            result = execute(experiment, Path(folder) / "log")
        peak = None
        if result.memory is not None:
            reserved = result.memory.peak_reserved_bytes
            peak = result.memory.peak_allocated_bytes if reserved is None else reserved
        prediction = predicted[number]
        row = {
            "repeat": repeat,
            **choice,
            "outcome": result.outcome.value,
            "predicted_peak_bytes": prediction.peak_reserved_bytes or prediction.peak_allocated_bytes,
            "peak_bytes": peak,
            "flops_per_sequence": flops[policy],
            "seconds_total": round(result.seconds_total, 4),
            "seconds_of_steps": " ".join(f"{record.seconds:.5f}" for record in result.steps),
        }
        _append(output, row)
        print(row, file=sys.stderr, flush=True)


def _measured(output: Path) -> set[tuple[str, ...]]:
    if not output.exists():
        return set()
    with output.open(newline="") as file:
        return {
            (row["repeat"], row["micro_batch_size"], row["checkpointing"], row["precision"])
            for row in csv.DictReader(file)
        }


def _append(output: Path, row: Mapping[str, Any]) -> None:
    is_new = not output.exists()
    with output.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    """Measure all, and say on what."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, default=FOLDER)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA GPU, and this machine has none; measure its CPU: --device cpu")
    form = FORMS["tiny" if given.tiny else given.device]
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    name = f"search_table_{'tiny' if given.tiny else given.device}_{date}"
    about = {**environment(torch.device(given.device)), "threads": torch.get_num_threads(), **form.common}
    (given.output / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")
    measure(form, given.output / f"{name}.csv", given.repeats)


if __name__ == "__main__":
    main()
