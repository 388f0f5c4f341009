"""How far predicted peaks are from a GPU's measured ones; every prediction is on disk before anything is measured.

    python benchmarks/gpu/prediction.py                        writes prediction_<device>_<date>.md and .json next to it
    python benchmarks/gpu/prediction.py --device cpu --tiny    the same in two minutes, without a GPU

Every configuration is trained for three optimizer steps in a process of its own.
"""

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.base.results import Outcome, Result
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.settings import merged, nested
from pipeline.memory.device import find_device, hardware_of
from pipeline.prediction.predict import Prediction, predict
from pipeline.runtime.environment import environment
from pipeline.runtime.run import execute

SHORT = {"num_steps": 3, "timing_warmup_steps": 2, "eval_steps": 0}
TINY = {"causal_lm.num_layers": 2, "causal_lm.width": 64, "causal_lm.num_heads": 2, "vocabulary_size": 512}
POLICIES = ("none", "every_layer", "every_2_layers")
SHOWN = ("device_name", "device_memory_mib", "driver", "cuda", "torch", "transformers", "python", "allocator")
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
    phases = dict(made.phase_bytes)
    return {**values, "phases": phases, "peak_phase": made.breakdown.phase, "seconds": time.perf_counter() - start}


def measured(experiment: Experiment) -> dict[str, Any]:
    """Return what a real run used, in bytes, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        result: Result = execute(experiment, Path(folder) / "log")
    values = {name: getattr(result.memory, name, None) for name in QUANTITIES.values()}
    phases = {f"{p.step}:{p.phase}": p.allocated_bytes for p in result.memory.phases} if result.memory else {}
    return {**values, "phases": phases, "outcome": str(result.outcome), "detail": result.detail}


def error_percent(row: dict[str, Any], quantity: str) -> float | None:
    """Return how much more was predicted than measured; None where the run did not complete, before its peak maybe."""
    if not Outcome(row["measured"]["outcome"]).completed:
        return None
    guess, truth = (row[side].get(QUANTITIES[quantity]) for side in ("predicted", "measured"))
    return None if not guess or not truth else 100 * (guess / truth - 1)


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each quantity that the device has."""
    for quantity in QUANTITIES:
        errors = sorted(abs(error) for row in rows if (error := error_percent(row, quantity)) is not None)
        if errors:
            yield (
                f"- {quantity}: {len(errors)} configurations, median error {statistics.median(errors):.2f} %, "
                f"95th percentile {errors[int(0.95 * (len(errors) - 1))]:.2f} %, worst {errors[-1]:.2f} %"
            )


def page(rows: list[dict[str, Any]], about: dict[str, str], title: str, command: str) -> str:
    """Return the table as Markdown."""

    def cells(row: dict[str, Any]) -> Iterator[str]:
        yield described(row["settings"])
        for quantity, name in QUANTITIES.items():
            error = error_percent(row, quantity)
            for side in ("predicted", "measured"):
                yield f"{row[side][name] / 2**20:,.1f}" if row[side].get(name) else ""
            yield f"{error:+.2f} %" if error is not None else ""
        yield f"{row['predicted']['seconds']:.2f}"
        yield row["measured"]["outcome"]

    heads = [f"{quantity} {side}" for quantity in QUANTITIES for side in ("predicted MiB", "measured MiB", "error")]
    head = ["configuration", *heads, "s to predict", "outcome"]
    table = [head, ["---"] + ["---:"] * (len(head) - 2) + ["---"], *(list(cells(row)) for row in rows)]
    facts = [["what", "value"], ["---", "---"], *([name, about[name]] for name in SHOWN if name in about)]
    lines = [f"# {title}", "", f"Written by `{command}`; one run each, all predicted before the first one ran.", ""]
    lines += ["| " + " | ".join(row) + " |" for row in facts] + [""]
    lines += [*summary(rows), ""] + ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([*lines, ""])


def main() -> None:
    """Predict all, write that down, measure all, write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    chosen = parser.parse_args()
    device = find_device(chosen.device)
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    file = chosen.output / f"prediction_{'tiny_' if chosen.tiny else ''}{device.type}_{date}.json"
    rows: list[dict[str, Any]] = []
    for settings in tiny() if chosen.tiny else on_gpu():
        experiment = make_experiment(merged(nested({**SHORT, "device": str(device)}), nested(settings)), "main")
        experiment.prepare()
        rows.append({"settings": settings, "experiment": experiment, "predicted": predicted(experiment)})
    plain = [{key: value for key, value in row.items() if key != "experiment"} for row in rows]
    file.write_text(json.dumps(plain, indent=1))
    print(f"{len(rows)} predictions are in {file}", flush=True)
    for row, kept in zip(rows, plain, strict=True):
        kept["measured"] = measured(row["experiment"])
        error = error_percent(kept, "allocated")
        print(described(row["settings"]), kept["measured"]["outcome"], error, flush=True)
        file.write_text(json.dumps(plain, indent=1))
    title = f"Predicted and measured peak memory, {device.type}, {date}"
    command = " ".join(["python", "benchmarks/gpu/prediction.py", *sys.argv[1:]])
    file.with_suffix(".md").write_text(page(plain, environment(device), title, command))
    print("\n".join(summary(plain)))


if __name__ == "__main__":
    main()
