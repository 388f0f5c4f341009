"""What each lever saves and costs alone, and one after another: the variants of experiments/levers.yaml, repeated.

    python benchmarks/levers.py                     on this machine: gpt2-nano on a CPU, gpt2 on a GPU
    python benchmarks/levers.py --repeats 2         fewer runs of each variant
    python benchmarks/levers.py --tiny --folder F   a model that trains in a second, to try the script

Every run has a process of its own, in random order within a repeat; configurations that two comparisons share run once.
Writes levers_<device>_<model>_<date>.csv with a line for each run, and a page and a waterfall of the medians. A run is
added to the file as it ends: the same command resumes an interrupted one.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from exit_code import Deadline, exit_code_of, files_parser
from journal import Journal
from levers_page import names_in_journal, page, waterfall

from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome
from pipeline.config.experiment import Experiment
from pipeline.config.given import nested
from pipeline.config.variants import EntryPoint, load_entry_point
from pipeline.memory.device import find_device, hardware_of
from pipeline.prediction.predict import predict_each
from pipeline.runtime.environment import environment
from pipeline.runtime.run import execute

COLUMNS = (
    "repeat",
    "variant",
    "outcome",
    "predicted_allocated_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "seconds_per_step",
    "losses",
)
SHARED = {"eval_steps": 0, "num_steps": 12}
FORMS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {**SHARED, "model": "gpt2-nano"},
    "cuda": {**SHARED, "model": "gpt2", "sequence_length": 512},
    "tiny": {
        **SHARED,
        "model": "gpt2-nano",
        "num_steps": 4,
        "sequence_length": 32,
        "vocabulary_size": 512,
        "causal_lm.num_layers": 2,
        "causal_lm.width": 32,
    },
}
"""Settings that all variants share, by the kind of device."""


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is left, and write the page; return the exit code, as exit_code_of() does."""
    parser = files_parser(__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this script out")
    parser.add_argument("--variants", help="some of them, with commas between; the baselines run always")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each variant")
    parser.add_argument("--minutes", type=float, help="begin no run after this many minutes")
    given = parser.parse_args(words)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> int:
    deadline, device = Deadline(given.minutes), find_device(given.device)
    if given.repeats < 1:
        raise InvalidInputError(f"--repeats must be 1 or more, and is {given.repeats}; leave it out for 5")
    form = FORMS["tiny" if given.tiny else device.type]
    entry = load_entry_point("levers", nested({**form, "device": str(device)}))
    name = f"levers_{'tiny_' if given.tiny else ''}{device.type}_{form['model']}_{given.date}"
    about = {**environment(device), "threads": str(torch.get_num_threads()), **form}
    decisive = json.dumps({key: value for key, value in about.items() if not key.startswith("git_")})
    journal = Journal.open(given.folder / f"{name}.csv", COLUMNS, (), {"": decisive})
    runs = _chosen(entry, given.variants)
    num_left = _measure(runs, journal, given.repeats, deadline)
    shown = [row for row in journal.rows() if int(row["repeat"]) < given.repeats]
    text = page(entry, shown, about, f"{name}.png", num_left)
    (given.folder / f"{name}.md").write_text(text)
    (given.folder / f"{name}.png").write_bytes(waterfall(entry, shown))
    return num_left


def _chosen(entry: EntryPoint, names: str | None) -> dict[str, Experiment]:
    """Return the experiments that this machine can run, those with equal settings once, by their names."""
    wanted = None if names is None else {name.strip() for name in names.split(",")}
    known = {variant.name for variant in entry.variants}
    if wanted is not None and not wanted <= known:
        raise InvalidInputError(f"no variant is called {min(wanted - known)!r}; they are {', '.join(sorted(known))}")
    names_of = names_in_journal(entry)
    return {
        names_of[variant.comparison, variant.name]: variant.experiment
        for variant in entry.variants
        if not variant.skipped and (wanted is None or variant.is_baseline or variant.name in wanted)
    }


def _measure(runs: Mapping[str, Experiment], journal: Journal, repeats: int, deadline: Deadline) -> int:
    """Measure the runs that the journal lacks, in random order within each repeat; return how many are left."""
    done = {(row["repeat"], row["variant"]) for row in journal.rows()}
    order = [(repeat, name) for repeat in range(repeats) for name in runs]
    order.sort(key=lambda pair: (pair[0], random.Random(repr(pair)).random()))  # noqa: S311
    waiting = [(repeat, name) for repeat, name in order if (str(repeat), name) not in done]
    predicted = _predicted(runs) if waiting else {}
    while waiting and not deadline.is_over:
        repeat, name = waiting.pop(0)
        row = {"repeat": repeat, "variant": name, **_measured(runs[name]), **predicted[name]}
        journal.add(row)
        print({key: value for key, value in row.items() if key != "losses"}, file=sys.stderr, flush=True)
    return len(waiting)


def _predicted(runs: Mapping[str, Experiment]) -> dict[str, dict[str, Any]]:
    """Return the predicted peak of each run, by its column; none where it cannot be predicted."""
    found: dict[str, dict[str, Any]] = {}
    names, experiments = list(runs), list(runs.values())
    hardware = hardware_of(experiments[0].device)
    for number, prediction in predict_each(experiments, hardware):
        unknown = isinstance(prediction, InvalidInputError) or experiments[number].notes(hardware)
        found[names[number]] = {"predicted_allocated_bytes": None if unknown else prediction.peak_allocated_bytes}
    return found


def _measured(experiment: Experiment) -> dict[str, Any]:
    """Run it; return the columns of what it measured."""
    with tempfile.TemporaryDirectory() as folder:
        result = execute(experiment, Path(folder) / "log")
    if result.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    timed = [record.seconds for record in result.steps[experiment.settings.timing_warmup_steps :]]
    return {
        "outcome": result.outcome.value,
        "peak_allocated_bytes": result.memory and result.memory.peak_allocated_bytes,
        "peak_reserved_bytes": result.memory and result.memory.peak_reserved_bytes,
        "seconds_per_step": f"{statistics.median(timed):.6f}" if timed else "",
        "losses": " ".join(f"{record.loss:.7f}" for record in result.steps),
    }


if __name__ == "__main__":
    sys.exit(main())
