"""What recomputation and offloading save and cost: processor seconds on a CPU, and predicted memory of a card.

    OMP_NUM_THREADS=1 python benchmarks/recomputation.py

Steps of all policies take turns in one process; a row has the median of the seconds and of the ratios to no policy.
"""

import datetime
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.memory.device import hardware_of
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.training.loop import Loop
from pipeline.training.step import build_step

CARD = "rtx4090"
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "every_layer": {"checkpointing": "every_layer"},
    "attention_saved": {"checkpointing": "attention_saved"},
    "offloaded": {"checkpointing": "offloaded"},
    "activation_offloading": {"activation_offloading": True, "offloading_min_mib": 0.0625},
}
ON_CPU: tuple[dict[str, Any], ...] = (
    *({"model": model, "micro_batch_size": 8, "sequence_length": 256} for model in ("gpt2-nano", "llama-nano")),
    *(
        {
            "model": "encoder_stack",
            "corpus": "random_vectors",
            "encoder_stack": {"num_layers": 3, "width": 128, "num_heads": 2},
            "sequence_length": length,
            "micro_batch_size": 2048 // length,
        }
        for length in (256, 1024, 2048)
    ),
)
ROUNDS, WARMUP = 9, 2


def measured(shape: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy on this machine's CPU."""
    experiments = {name: make_experiment({"device": "cpu", **shape, **each}, "main") for name, each in POLICIES.items()}
    loops = {name: _loop(experiment) for name, experiment in experiments.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, loop in loops.items():
            start = time.process_time()
            loop.launch()
            seconds[name].append(time.process_time() - start)
    for name, experiment in experiments.items():
        ratios = [a / b for a, b in zip(seconds[name][WARMUP:], seconds["none"][WARMUP:], strict=True)]
        peaks = predict(experiment, hardware_of(experiment.device))
        yield {
            "device": "cpu",
            **_labels(experiment, name),
            "allocated_mib": round(peaks.peak_allocated_bytes / MIB, 1),
            "sequence_gflop": round(peaks.pass_work.flops / peaks.micro_batch_size / 1e9, 3),
            "seconds": round(statistics.median(seconds[name][WARMUP:]), 3),
            "more_time_percent": round(100 * (statistics.median(ratios) - 1)),
        }


def predicted(model: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy on a card that need not be here."""
    shape = {"device": "cpu", "model": model, "micro_batch_size": 8, "sequence_length": 1024, "precision": "bf16"}
    plain = None
    for name, each in POLICIES.items():
        experiment = make_experiment(
            {**shape, **each, **({"offloading_min_mib": 1.0} if len(each) > 1 else {})}, "main"
        )
        peaks = predict(experiment, find_hardware(CARD))
        flops = peaks.pass_work.flops / peaks.micro_batch_size
        plain = plain or flops
        assert peaks.peak_reserved_bytes is not None
        yield {
            "device": CARD,
            **_labels(experiment, name),
            "allocated_mib": round(peaks.peak_allocated_bytes / MIB),
            "reserved_mib": round(peaks.peak_reserved_bytes / MIB),
            "sequence_gflop": round(flops / 1e9, 3),
            "operations_percent": round(100 * flops / plain),
        }


def _labels(experiment: Experiment, policy: str) -> dict[str, Any]:
    settings = experiment.settings
    size = {"micro_batch_size": experiment.micro_batch_size, "sequence_length": settings.sequence_length}
    return {"model": settings.model, **size, "policy": policy}


def _loop(experiment: Experiment) -> Loop:
    prepared = experiment.prepare()
    torch.manual_seed(0)
    step = build_step(experiment, prepared)
    optimizer = step.make_optimizer(step.trainable.module)
    return Loop(experiment, prepared.train, step, optimizer, lambda record: None)


def main() -> None:
    """Write all rows."""
    rows = [row for model in ("gpt2", "gpt2-medium") for row in predicted(model)]
    for shape in ON_CPU:
        rows += measured(shape)
        print(*rows[-len(POLICIES) :], sep="\n", flush=True)
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    write(rows, Path(__file__).parent / f"recomputation_{date}.md")


def write(rows: list[dict[str, Any]], file: Path) -> None:
    """Write the rows as a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([str(row.get(name, "")) for name in names] for row in rows)]
    file.write_text("# Recomputation and offloading\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))


if __name__ == "__main__":
    main()
