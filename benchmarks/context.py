"""How much memory a CUDA context takes after training in each precision, on this machine's GPU.

    python benchmarks/context.py    writes benchmarks/context_<device>_<date>.md

Each row is a clean process that trains a small model for three optimizer steps in each of its precisions.
"""

import argparse
import sys
from collections.abc import Sequence

from exit_code import exit_code_of, files_parser

from pipeline.base.units import MIB
from pipeline.memory.device import find_device, hardware_of
from pipeline.prediction.cards import assumed_context_bytes
from pipeline.prediction.cuda_context import measure_context, trainings
from pipeline.runtime.environment import environment

SHOWN = ("device_name", "device_memory_mib", "driver", "cuda", "torch", "transformers", "python", "allocator")


def main(words: Sequence[str] | None = None) -> int:
    """Measure all rows and write the table; return the exit code: 0, 2 invalid input, 130 interrupted."""
    parser = files_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(words)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> int:
    """Return the number of rows that could not be measured."""
    device = find_device(given.device)
    card = hardware_of(device)
    all_of_them = trainings(device, card)
    rows = []
    for experiments in [*([experiment] for experiment in all_of_them), all_of_them]:
        taken = measure_context(experiments)
        name = ", ".join(str(experiment.params()["precision"]) for experiment in experiments)
        rows.append((name, "unknown: no NVML, or the training failed" if taken is None else f"{taken / MIB:,.1f}"))
        print(*rows[-1], flush=True)
    about = environment(device)
    lines = [
        f"# Memory of a CUDA context, {device.type}, {given.date}",
        "",
        "Written by `python benchmarks/context.py`: memory in use on the card (NVML) less what torch reserved.",
        "",
        "| what | value |",
        "|---|---|",
        *(f"| {name} | {about[name]} |" for name in SHOWN if name in about),
        "",
        "| trained in | context MiB |",
        "|---|---:|",
        *(f"| {name} | {taken} |" for name, taken in rows),
        "",
        f"A card like this one that is in no machine is assumed to take {assumed_context_bytes(card) / MIB:,.0f} MiB.",
        "",
    ]
    (given.folder / f"context_{device.type}_{given.date}.md").write_text("\n".join(lines))
    return sum(taken.startswith("unknown") for _, taken in rows)


if __name__ == "__main__":
    sys.exit(main())
