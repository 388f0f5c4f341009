"""LoRA on the shipped conversations at every cut of the batch: held-out loss, peak and time, on a CPU.

    python benchmarks/fine_tuning.py               writes fine_tuning_cpu_<date>.csv and .md
    python benchmarks/fine_tuning.py --num_steps 8 --folder F    a short one, to try the script

The frozen weights are those of a gpt2-nano that has first been trained in full on CPython's reference text, with a
tokenizer of that text and the conversations, and saved and loaded as a checkpoint of transformers. An effective batch
of 16 conversations; one run of each micro-batch size.
"""

import argparse
import csv
import datetime
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any

import torch

from pipeline.base.units import MIB
from pipeline.config.experiment import make_experiment
from pipeline.data._support.chat_template import trained_chat_template
from pipeline.data.chat import SHIPPED
from pipeline.models.causal_lm import CausalLm
from pipeline.prediction.summary import prediction_of
from pipeline.runtime.environment import environment
from pipeline.runtime.run import execute
from pipeline.training.loop import Loop
from pipeline.training.metrics import summarize
from pipeline.training.step import build_step

FOLDER = Path(__file__).parent
BASE: Mapping[str, Any] = {
    "device": "cpu",
    "corpus": "python_docs",
    "sequence_length": 128,
    "effective_batch_size": 16,
    "micro_batch_size": 16,
    "loss_kernel": "chunked",
    "learning_rate": 1e-3,
    "learning_rate_schedule": "linear",
    "learning_rate_warmup_steps": 10,
}
"""The training of the frozen weights."""
VOCABULARY_SIZE = 4096
SHARED: Mapping[str, Any] = {
    "causal_lm": {"pretrained": True},
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
    parser.add_argument("--base_steps", type=int, default=400, help="optimizer steps of the training in full")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are written")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = trained_base(folder, asked.base_steps)
        before = trained(folder, SIZES[-1], 3, {"learning_rate": 1e-12})["held_out_loss"]
        rows = [trained(folder, size, asked.num_steps) for size in SIZES]
    about = (
        f"Trained in full for {asked.base_steps} optimizer steps of 16 x 128 tokens, the frozen weights have a loss of "
        f"{base[-1]:.4f}, at first {base[0]:.4f}; on held-out conversations {before:.4f} before any adapter is trained."
    )
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    asked.folder.mkdir(parents=True, exist_ok=True)
    file = asked.folder / f"fine_tuning_cpu_{date}.csv"
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    file.with_suffix(".md").write_text(page(rows, asked.num_steps, date, about))


def trained_base(folder: str, num_steps: int) -> list[float]:
    """Train a gpt2-nano in full, save it in a folder with a tokenizer, and return its losses."""
    texts = [*(topics[name] for name in sorted(topics)), SHIPPED.read_text()]
    template = trained_chat_template([[{"role": "user", "content": text} for text in texts]], VOCABULARY_SIZE)
    template.tokenizer.save_pretrained(folder)
    CausalLm().configuration("gpt2-nano", VOCABULARY_SIZE).save_pretrained(folder)
    experiment, records = make_experiment({**BASE, "model": folder, "num_steps": num_steps}, "main"), list[Any]()
    prepared = experiment.prepare()
    torch.manual_seed(experiment.settings.seed)
    step = build_step(experiment, prepared)
    loop = Loop(experiment, prepared.train, step, step.make_optimizer(step.trainable.module), records.append)
    loop.advance(num_steps)
    step.trainable.module.save_pretrained(folder)  # type: ignore[operator]
    return [one.loss for one in records]


def trained(
    folder: str, size: int, num_steps: int, changes: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the row of a micro-batch size."""
    settings = {**SHARED, "model": folder, "num_steps": num_steps, "timing_warmup_steps": 2, "micro_batch_size": size}
    experiment = make_experiment({**settings, **changes}, "main")
    with tempfile.TemporaryDirectory() as log:
        result = execute(experiment, Path(log) / "log")
    metrics = summarize(result, experiment.effective_batch_size, 2)
    row = {
        "micro_batch_size": size,
        "first_loss": result.steps[0].loss,
        "last_loss": result.steps[-1].loss,
        "held_out_loss": metrics["eval_loss"],
        "peak_mib": metrics["peak_allocated_mib"],
        "predicted_mib": prediction_of(experiment).peak_bytes / MIB,
        "seconds_per_step": metrics["seconds_per_step"],
    }
    print(row, flush=True)
    return row


def page(rows: Sequence[Mapping[str, float]], num_steps: int, date: str, base: str) -> str:
    """Return the table as Markdown."""
    about, losses = environment(torch.device("cpu")), [row["held_out_loss"] for row in rows]
    lines = [
        f"# LoRA on the shipped conversations at every cut of the batch, {date}",
        "",
        f"Written by `python benchmarks/fine_tuning.py`: gpt2-nano, {num_steps} optimizer steps of 16 conversations,",
        f"one run each. {base}",
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
