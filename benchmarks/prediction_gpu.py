"""How far predicted peaks are from a GPU's measured ones; every prediction is on disk before anything is measured.

    python benchmarks/prediction_gpu.py                        writes benchmarks/prediction_<device>_<date>.md and .json
    python benchmarks/prediction_gpu.py --device cpu --tiny    the same in two minutes, without a GPU

Every configuration is trained for three optimizer steps in a process of its own. A run is added to the .json as it
ends: the same command resumes an interrupted one.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from exit_code import Deadline, exit_code_of, files_parser

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import write_atomically
from pipeline.base.results import Outcome, Result
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.given import merged, nested
from pipeline.memory.device import find_device, hardware_of
from pipeline.prediction.predict import predict
from pipeline.prediction.prediction import Prediction
from pipeline.runtime.environment import environment
from pipeline.runtime.run import execute

SHORT = {"num_steps": 3, "timing_warmup_steps": 2, "eval_steps": 0}
TINY = {"causal_lm.num_layers": 2, "causal_lm.width": 64, "causal_lm.num_heads": 2, "vocabulary_size": 512}
POLICIES = ("none", "every_layer", "every_2_layers")
SHOWN = ("device_name", "device_memory_mib", "driver", "cuda", "torch", "transformers", "python", "allocator")
DECISIVE = ("device_name", "driver", "cuda", "torch", "transformers", "python", "allocator")
"""Conditions that all runs of a file share."""
QUANTITIES = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes", "device": "peak_device_bytes"}


def on_gpu() -> Iterator[dict[str, Any]]:
    """Yield settings: both models at both lengths, from small to large batches, with every technique."""
    for model, (precision, policy) in product(("gpt2", "gpt2-medium"), product(("fp32", "bf16"), POLICIES)):
        for size in (4, 16):
            yield _settings(model, 1024, size, precision, policy)
    for model, length in product(("gpt2", "gpt2-medium"), (512, 1024)):
        for size in (1, 2, 8, 32):
            yield _settings(model, length, size, "bf16", "none")
        for precision in ("tf32", "fp16"):
            yield _settings(model, length, 8, precision, "every_layer")
        for size, precision in ((2, "fp32"), (8, "bf16")):
            yield {**_settings(model, length, size, precision, "none"), "accumulation_steps": 4}
    for model in ("gpt2", "gpt2-medium"):
        yield {**_settings(model, 1024, 8, "bf16", "none"), "causal_lm.dropout": 0.0}
        yield {**_settings(model, 1024, 4, "fp16", "none"), "accumulation_steps": 4}


def tiny() -> Iterator[dict[str, Any]]:
    """Yield settings of a model that trains on a CPU within seconds."""
    for precision, policy, size in product(("fp32", "bf16"), POLICIES, (2, 8)):
        for steps, length in product((1, 4), (64, 128)):
            settings = _settings("gpt2-nano", length, size, precision, policy)
            yield {**settings, **TINY, "accumulation_steps": steps}


def _settings(model: str, length: int, size: int, precision: str, policy: str) -> dict[str, Any]:
    shape = {"model": model, "sequence_length": length, "micro_batch_size": size}
    return {**shape, "precision": precision, "checkpointing": policy}


def described(settings: dict[str, Any]) -> str:
    """Return settings as text."""
    return ", ".join(f"{name}={value}" for name, value in settings.items() if name not in TINY)


def predicted(experiment: Experiment) -> dict[str, Any]:
    """Return a prediction in bytes, and how long it took."""
    start = time.perf_counter()
    made: Prediction = predict(experiment, hardware_of(experiment.device))
    values = {name: getattr(made, name) for name in QUANTITIES.values()}
    return {**values, "seconds": time.perf_counter() - start}


def measured(experiment: Experiment) -> dict[str, Any]:
    """Return what a real run used, in bytes, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        result: Result = execute(experiment, Path(folder) / "log")
    if result.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    values = {name: getattr(result.memory, name, None) for name in QUANTITIES.values()}
    phases = {f"{p.step}:{p.phase}": p.allocated_bytes for p in result.memory.phases} if result.memory else {}
    return {**values, "phases": phases, "outcome": str(result.outcome), "detail": result.detail}


def error_percent(row: dict[str, Any], quantity: str) -> float | None:
    """Return how much more was predicted than measured; None where the run did not complete, before its peak maybe."""
    if "measured" not in row or not Outcome(row["measured"]["outcome"]).completed:
        return None
    guess, truth = (row[side].get(QUANTITIES[quantity]) for side in ("predicted", "measured"))
    return None if not guess or not truth else 100 * (guess / truth - 1)


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each quantity that the device has."""
    for quantity in QUANTITIES:
        errors = sorted(abs(error) for row in rows if (error := error_percent(row, quantity)) is not None)
        if errors:
            yield (
                f"- {quantity}: {len(errors)} configurations, median error {statistics.median(errors):.4f} %, "
                f"95th percentile {errors[int(0.95 * (len(errors) - 1))]:.4f} %, worst {errors[-1]:.4f} %"
            )


def page(rows: Sequence[dict[str, Any]], about: Mapping[str, str], title: str, command: str) -> str:
    """Return the table as Markdown."""

    def cells(row: dict[str, Any]) -> Iterator[str]:
        yield described(row["settings"])
        for quantity, name in QUANTITIES.items():
            error = error_percent(row, quantity)
            for side in ("predicted", "measured"):
                yield f"{row[side][name] / 2**20:,.1f}" if row.get(side, {}).get(name) else ""
            yield f"{error:+.4f} %" if error is not None else ""
        yield f"{row['predicted']['seconds']:.2f}"
        yield row["measured"]["outcome"] if "measured" in row else "not run yet"

    heads = [f"{quantity} {side}" for quantity in QUANTITIES for side in ("predicted MiB", "measured MiB", "error")]
    head = ["configuration", *heads, "s to predict", "outcome"]
    table = [head, ["---"] + ["---:"] * (len(head) - 2) + ["---"], *(list(cells(row)) for row in rows)]
    facts = [["what", "value"], ["---", "---"], *([name, about[name]] for name in SHOWN if name in about)]
    lines = [f"# {title}", "", f"Written by `{command}`; one run each, all predicted before the first one ran.", ""]
    lines += ["| " + " | ".join(row) + " |" for row in facts] + [""]
    lines += [*summary(rows), ""] + ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([*lines, ""])


def predictions(
    experiments: Sequence[tuple[dict[str, Any], Experiment]], file: Path, decisive: Mapping[str, str]
) -> Any:
    """Return the content of the file, which is made with all predictions if there is none.

    Raises:
        InvalidInputError: its runs had other conditions or settings, or it cannot be written.

    """
    chosen = [settings for settings, _ in experiments]
    if file.exists():
        found = json.loads(file.read_text())
        if found["conditions"] != decisive or [row["settings"] for row in found["rows"]] != chosen:
            raise InvalidInputError(
                f"runs must be measured under one set of conditions, and those in {file} had other settings, versions "
                "or hardware; move that file away, or name another folder: --folder results"
            )
        return found
    rows = [{"settings": settings, "predicted": predicted(experiment)} for settings, experiment in experiments]
    content = {"conditions": decisive, "rows": rows}
    write_atomically(file, json.dumps(content, indent=1).encode())
    print(f"{len(rows)} predictions are in {file}", flush=True)
    return content


def main(words: Sequence[str] | None = None) -> int:
    """Predict all, write that down, measure all, write the table; return the exit code (exit_code.py)."""
    parser = files_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, for any machine")
    parser.add_argument("--sample", type=int, help="only so many configurations, evenly chosen")
    parser.add_argument("--minutes", type=float, help="begin no run after this many minutes")
    given = parser.parse_args(words)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> int:
    deadline, device = Deadline(given.minutes), find_device(given.device)
    settings = list(tiny() if given.tiny else on_gpu())
    settings = settings[:: max(1, len(settings) // given.sample)][: given.sample] if given.sample else settings
    experiments = [(each, _experiment(each, device)) for each in settings]
    about = environment(device)
    file = given.folder / f"prediction_{'tiny_' if given.tiny else ''}{device.type}_{given.date}.json"
    content = predictions(experiments, file, {name: about[name] for name in DECISIVE if name in about})
    rows = content["rows"]
    waiting = [
        (row, experiment) for row, (_, experiment) in zip(rows, experiments, strict=True) if "measured" not in row
    ]
    while waiting and not deadline.is_over:
        row, experiment = waiting.pop(0)
        row["measured"] = measured(experiment)
        print(described(row["settings"]), row["measured"]["outcome"], error_percent(row, "allocated"), flush=True)
        write_atomically(file, json.dumps(content, indent=1).encode())
    title = f"Predicted and measured peak memory, {device.type}, {given.date}"
    command = " ".join(["python", "benchmarks/prediction_gpu.py", *sys.argv[1:]])
    file.with_suffix(".md").write_text(page(rows, about, title, command))
    print("\n".join(summary(rows)))
    return len(waiting)


def _experiment(settings: Mapping[str, Any], device: torch.device) -> Experiment:
    experiment = make_experiment(merged(nested({**SHORT, "device": str(device)}), nested(settings)), "main")
    experiment.prepare()
    return experiment


if __name__ == "__main__":
    sys.exit(main())
