"""LoRA on the shipped conversations at every cut of the batch: held-out loss, peak and time, on a CPU.

    python benchmarks/fine_tuning.py               writes fine_tuning_cpu_<date>.csv and .md
    python benchmarks/fine_tuning.py --num_steps 8 --folder F    a short one, to try the script

gpt2-nano with random frozen weights, an effective batch of 16 conversations; one run of each micro-batch size.
"""

import argparse
import csv
import datetime
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.base.units import MIB
from pipeline.config.experiment import make_experiment
from pipeline.memory.device import hardware_of
from pipeline.prediction.predict import predict
from pipeline.runtime.environment import environment
from pipeline.runtime.run import execute
from pipeline.training.metrics import summarize

FOLDER = Path(__file__).parent
SHARED: Mapping[str, Any] = {
    "model": "gpt2-nano",
    "device": "cpu",
    "corpus": "chat",
    "sequences": "padded",
    "sequence_length": 64,
    "effective_batch_size": 16,
    "adapter": "lora",
    "learning_rate": 3e-3,
    "eval_steps": 4,
}
SIZES = (16, 8, 4, 2, 1)
"""Micro-batch sizes."""
SHOWN = ("processor", "cores", "host_memory_mib", "python", "torch", "transformers")
HEAD = ("micro-batch", "held-out loss", "last loss", "peak MiB", "predicted MiB", "s/step")


def main() -> None:
    """Train at every cut, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_steps", type=int, default=60, help="optimizer steps of each run")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are written")
    asked = parser.parse_args()
    rows = [trained(size, asked.num_steps) for size in SIZES]
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    asked.folder.mkdir(parents=True, exist_ok=True)
    file = asked.folder / f"fine_tuning_cpu_{date}.csv"
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    file.with_suffix(".md").write_text(page(rows, asked.num_steps, date))


def trained(size: int, num_steps: int) -> dict[str, Any]:
    """Return the row of a micro-batch size."""
    settings = {**SHARED, "num_steps": num_steps, "timing_warmup_steps": 2, "micro_batch_size": size}
    experiment = make_experiment(settings, "main")
    with tempfile.TemporaryDirectory() as folder:
        result = execute(experiment, Path(folder) / "log")
    metrics = summarize(result, experiment.effective_batch_size, 2)
    row = {
        "micro_batch_size": size,
        "first_loss": result.steps[0].loss,
        "last_loss": result.steps[-1].loss,
        "held_out_loss": metrics["eval_loss"],
        "peak_mib": metrics["peak_allocated_mib"],
        "predicted_mib": predict(experiment, hardware_of(experiment.device)).peak_bytes / MIB,
        "seconds_per_step": metrics["seconds_per_step"],
    }
    print(row, flush=True)
    return row


def page(rows: Sequence[Mapping[str, float]], num_steps: int, date: str) -> str:
    """Return the table as Markdown."""
    about, losses = environment(torch.device("cpu")), [row["held_out_loss"] for row in rows]
    lines = [
        f"# LoRA on the shipped conversations at every cut of the batch, {date}",
        "",
        f"Written by `python benchmarks/fine_tuning.py`: gpt2-nano, {num_steps} optimizer steps of 16 conversations,",
        "one run each.",
        "",
        "| what | value |",
        "|---|---|",
        *(f"| {name} | {about[name]} |" for name in SHOWN if name in about),
        "",
        f"| {' | '.join(HEAD)} |",
        "|---:" * len(HEAD) + "|",
        *(_line(row) for row in rows),
        "",
        f"The held-out losses differ by {100 * (max(losses) / min(losses) - 1):.5f} %; the first loss in training is "
        f"{rows[0]['first_loss']:.4f}.",
    ]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, float]) -> str:
    return (
        f"| {row['micro_batch_size']} | {row['held_out_loss']:.6f} | {row['last_loss']:.6f} | {row['peak_mib']:.1f} | "
        f"{row['predicted_mib']:.1f} | {row['seconds_per_step']:.3f} |"
    )


if __name__ == "__main__":
    main()
