"""Measure every configuration of a space several times in random order: the table on which samplers are replayed.

    python benchmarks/search_table.py                     writes search_table_cpu_gpt2-nano_<date>.csv and .json
    python benchmarks/search_table.py --device cuda       the space of a GPU, with gpt2
    python benchmarks/search_table.py --whole             the default space of the search, on either device
    python benchmarks/search_table.py --whole --model llama-nano --effective_batch_size 48 --sequence_length 32
    python benchmarks/search_table.py --tiny --folder F   a space of four, to try the script

A run is added to the file as it ends: the same command resumes an interrupted one.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from exit_code import Deadline, exit_code_of, files_parser
from journal import Journal

from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.given import merged, nested
from pipeline.config.space import Choice, Space
from pipeline.memory.device import find_device, hardware_of
from pipeline.prediction.predict import predict_each
from pipeline.prediction.prediction import Prediction
from pipeline.runtime.environment import environment
from pipeline.runtime.run import execute
from pipeline.searching.experiment_problem import make_experiment_problem

DIMENSIONS = ("micro_batch_size", "checkpointing", "precision")
"""The dimensions of a space that is not the whole one."""
SETTINGS = ("device", "model", "sequence_length", "effective_batch_size", "eval_steps", "num_steps")
"""The settings that all configurations of a table share."""
COLUMNS = (
    "outcome",
    "predicted_peak_bytes",
    "peak_bytes",
    "flops_per_sequence",
    "seconds_total",
    "seconds_of_steps",
)
WHOLE_BATCH = 12
"""The effective batch size of the whole space: with six divisors gpt2-nano has 480 configurations on a CPU."""
POLICIES = ("none", "every_layer", "every_2_layers", "every_3_layers", "every_4_layers")
EVERY_WAY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)


@dataclass(frozen=True)
class Form:
    """A space and the settings that all of its configurations share."""

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


def measure(
    choices: Sequence[Choice], experiments: Sequence[Experiment], journal: Journal, repeats: int, deadline: Deadline
) -> int:
    """Measure the runs that the journal lacks, in random order, each equally often; return how many are left."""
    print(f"predicting {len(experiments)} configurations, which takes minutes the first time", file=sys.stderr)
    predicted = predictions_of(experiments)
    order = [(repeat, number) for repeat in range(repeats) for number in range(len(choices))]
    shuffled = sorted(order, key=lambda pair: (pair[0], random.Random(repr(pair)).random()))  # noqa: S311
    done = {(row["repeat"], *(row[name] for name in choices[0])) for row in journal.rows()}
    waiting = [
        (repeat, number)
        for repeat, number in shuffled
        if (str(repeat), *map(str, choices[number].values())) not in done
    ]
    while waiting and not deadline.is_over:
        repeat, number = waiting.pop(0)
        row = {"repeat": repeat, **choices[number], **measured(experiments[number], predicted[number])}
        journal.add(row)
        print(row, file=sys.stderr, flush=True)
    return len(waiting)


def predictions_of(experiments: Sequence[Experiment]) -> dict[int, Prediction]:
    """Return the prediction of each experiment by its number.

    Raises:
        InvalidInputError: one of them cannot be predicted.

    """
    predictions: dict[int, Prediction] = {}
    for number, outcome in predict_each(experiments, hardware_of(experiments[0].device)):
        if isinstance(outcome, InvalidInputError):
            raise outcome
        predictions[number] = outcome
    return predictions


def measured(experiment: Experiment, prediction: Prediction) -> dict[str, Any]:
    """Run it; return the columns of what it measured."""
    with tempfile.TemporaryDirectory() as folder:
        result = execute(experiment, Path(folder) / "log")
    if result.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    return {
        "outcome": result.outcome.value,
        "predicted_peak_bytes": prediction.peak_bytes,
        "peak_bytes": None if result.memory is None else result.memory.peak_bytes,
        "flops_per_sequence": int(prediction.pass_work.flops / prediction.micro_batch_size),
        "seconds_total": round(result.seconds_total, 4),
        "seconds_of_steps": " ".join(f"{record.seconds:.5f}" for record in result.steps),
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure all, and write the conditions; return the exit code, as exit_code_of() does."""
    given = _parser().parse_args(words)
    return exit_code_of(lambda: _run(given))


def _parser() -> argparse.ArgumentParser:
    parser = files_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="by default gpt2-nano on a CPU, gpt2 on a GPU")
    parser.add_argument("--effective_batch_size", type=int, help="by default 48, and 12 with --whole")
    parser.add_argument("--sequence_length", type=int, help="by default 64 on a CPU, 512 on a GPU")
    parser.add_argument("--whole", action="store_true", help="the default space of the search")
    parser.add_argument("--tiny", action="store_true", help="a space of four, to try this script out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="begin no run after this many minutes")
    return parser


def _run(given: argparse.Namespace) -> int:
    deadline = Deadline(given.minutes)
    device = find_device(given.device)
    kind = "tiny" if given.tiny else device.type
    common = FORMS[kind].common | ({"effective_batch_size": WHOLE_BATCH} if given.whole else {})
    common |= {name: value for name in SETTINGS if (value := getattr(given, name, None)) is not None}
    common |= {"device": str(device)}
    form = Form(common, make_experiment_problem(common).space if given.whole else FORMS[kind].space)
    experiments = [form.experiment(choice) for choice in form.space.choices]
    about = {**environment(device), "threads": torch.get_num_threads(), **form.common}
    about |= {"dimensions": list(form.space.dimensions)} if given.whole else {}
    words = ["search_table", *(["whole"] if given.whole else []), *(["tiny"] if given.tiny else []), device.type]
    name = "_".join([*words, Path(str(common["model"])).name, given.date])
    decisive = json.dumps({name: value for name, value in about.items() if not name.startswith("git_")})
    columns = ("repeat", *form.space.dimensions, *COLUMNS)
    journal = Journal.open(given.folder / f"{name}.csv", columns, (), {"": decisive})
    (given.folder / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")
    return measure(form.space.choices, experiments, journal, given.repeats, deadline)


if __name__ == "__main__":
    sys.exit(main())
