"""How far predicted peaks are from the allocator's exact ones, on this machine's CPU.

    python benchmarks/prediction.py            writes benchmarks/prediction_cpu_<date>.md and .csv

Every configuration is predicted first, then trained for three optimizer steps in a process of its own. Nothing is
fitted: the allocator's peak and the predicted one are compared byte by byte.
"""

import csv
import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pipeline.config.experiment import make_experiment
from pipeline.config.given import merged, nested
from pipeline.memory.device import hardware_of
from pipeline.prediction.predict import predict
from pipeline.runtime.environment import environment
from pipeline.runtime.run import execute

FOLDER = Path(__file__).parent
SHOWN = ("device_name", "cores", "host_memory_mib", "system", "python", "torch", "transformers")
COLUMNS = ("configuration", "predicted_bytes", "measured_bytes", "error_percent", "seconds_to_predict", "peak_phase")
COMMON = {
    "device": "cpu",
    "num_steps": 3,
    "timing_warmup_steps": 2,
    "eval_steps": 0,
    "random_vectors.num_sequences": 64,
    "encoder_stack.width": 256,
    "encoder_stack.num_heads": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2-nano": {"model": "gpt2-nano"},
    "gpt2-nano, 2 layers": {"model": "gpt2-nano", "causal_lm.num_layers": 2},
    "gpt2-nano, 8 layers": {"model": "gpt2-nano", "causal_lm.num_layers": 8},
    "gpt2-nano, 256 wide": {"model": "gpt2-nano", "causal_lm.width": 256},
    "llama-nano": {"model": "llama-nano"},
    "qwen3-nano": {"model": "qwen3-nano"},
    "encoder_stack": {"model": "encoder_stack", "corpus": "random_vectors", "encoder_stack.num_layers": 4},
}


def configurations() -> Iterator[dict[str, Any]]:
    """Yield settings: every shape at several batches, with every technique, and some of it together."""
    for shape in SHAPES.values():
        for precision in ("fp32", "bf16"):
            for policy in ("none", "every_layer", "every_2_layers"):
                yield {**shape, "micro_batch_size": 8, "precision": precision, "checkpointing": policy}
        for size in (1, 2, 4, 16):
            yield {**shape, "micro_batch_size": size}
        for steps in (2, 4):
            yield {**shape, "micro_batch_size": 2, "accumulation_steps": steps}
    for model in ("gpt2-nano", "llama-nano"):
        for changes in (
            {"precision": "fp32"},
            {"precision": "bf16", "checkpointing": "every_layer"},
            {"accumulation_steps": 4, "micro_batch_size": 2},
        ):
            yield {"model": model, "sequences": "padded", "micro_batch_size": 4, **changes}
    yield {"model": "gpt2-nano", "micro_batch_size": 4, "accumulation_steps": 2, "checkpointing": "every_layer"}
    yield {"model": "gpt2-nano", "micro_batch_size": 4, "causal_lm.dropout": 0.1}
    yield {"model": "gpt2-nano", "micro_batch_size": 4, "precision": "fp16"}


def compare(settings: dict[str, Any]) -> dict[str, Any]:
    """Predict, then measure, one configuration."""
    experiment = make_experiment(merged(nested(COMMON), nested(settings)), "main")
    prepared = experiment.prepare()
    start = time.perf_counter()
    prediction = predict(experiment, hardware_of(experiment.device), prepared)
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        result = execute(experiment, Path(folder) / "log")
    if result.memory is None or result.memory.peak_allocated_bytes is None:
        raise RuntimeError(f"{settings} could not be measured: {result.outcome}, {result.detail}")
    predicted, measured = prediction.peak_allocated_bytes, result.memory.peak_allocated_bytes
    return {
        "configuration": ", ".join(f"{name}={value}" for name, value in settings.items() if value != "random_vectors"),
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "error_percent": round(100 * (predicted / measured - 1), 4),
        "seconds_to_predict": round(seconds, 2),
        "peak_phase": prediction.breakdown.phase,
    }


def page(rows: list[dict[str, Any]], date: str) -> str:
    """Return the table as Markdown."""
    about = environment(torch.device("cpu"))
    errors = sorted(abs(row["error_percent"]) for row in rows)
    lines = [
        f"# Predicted and measured peak memory, cpu, {date}",
        "",
        "Written by `python benchmarks/prediction.py`; one run each, in a process of its own. Error is predicted / "
        "measured - 1; measured is the allocator's exact peak.",
        "",
        "| what | value |",
        "|---|---|",
        *(f"| {name} | {about[name]} |" for name in SHOWN if name in about),
        "",
        f"{len(rows)} configurations: median error {statistics.median(errors):.3f} %, 95th percentile "
        f"{errors[int(0.95 * (len(errors) - 1))]:.3f} %, worst {errors[-1]:.3f} %; "
        f"median {statistics.median(row['seconds_to_predict'] for row in rows):.2f} s to predict one.",
        "",
        "| configuration | predicted MiB | measured MiB | error | s | peak in |",
        "|---|---:|---:|---:|---:|---|",
    ]
    table = [
        f"| {row['configuration']} | {row['predicted_bytes'] / 2**20:.2f} | {row['measured_bytes'] / 2**20:.2f} | "
        f"{row['error_percent']:+.3f} % | {row['seconds_to_predict']:.2f} | {row['peak_phase']} |"
        for row in rows
    ]
    return "\n".join([*lines, *table, ""])


def main() -> None:
    """Run all, write the table."""
    rows = []
    for settings in configurations():
        rows.append(compare(settings))
        print({name: rows[-1][name] for name in ("configuration", "error_percent")}, file=sys.stderr, flush=True)
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    with (FOLDER / f"prediction_cpu_{date}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    (FOLDER / f"prediction_cpu_{date}.md").write_text(page(rows, date))


if __name__ == "__main__":
    main()
