"""torchtitan's published memory of Llama 3.1 8B on many GPUs, and what one simulated rank of as many says.

    python benchmarks/torchtitan.py TABLE.csv --python ENVIRONMENT/bin/python --checkout TORCHTITAN --tokenizer FILE

It appends the rows that the table does not have, in GiB of reserved memory, as torchtitan prints it. The interpreter is
of an environment with torch's CUDA build and what torchtitan needs; the checkout is of commit 9dec370 (December 2024),
and its training script is not changed; FILE is a tokenizer of Llama 3's size, and the checkout's data set c4_test any
text. Two settings were chosen after seeing the published figures: attention without cuDNN's kernel, which torch came to
prefer only later, and no expandable segments. The card is an H200 throughout: theirs, of 96 GB, is not known here.
"""

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rows import add_missing

from pipeline.base.units import MIB
from pipeline.prediction.commands.simulation import simulate
from pipeline.simulation.cards import find_card
from pipeline.simulation.run import Simulate

GIB = 1024 * MIB
WITHOUT_CUDNN_ATTENTION = """
import runpy, sys, torch
torch.backends.cuda.enable_cudnn_sdp(False)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SELECTIVE = ("--training.batch_size", "2")
COMPILED = (*SELECTIVE, "--training.compile")
FLOAT8 = (
    "--float8.enable_float8_linear",
    "--float8.enable_fsdp_float8_all_gather",
    "--float8.precompute_float8_dynamic_scale_for_fsdp",
)
FULL = ("--training.compile", *FLOAT8, "--activation_checkpoint.mode", "full")
CASES = {
    "FSDP 8": (8, SELECTIVE, 82.4),
    "FSDP 128": (128, SELECTIVE, 67.0),
    "FSDP 8, torch.compile": (8, COMPILED, 77.0),
    "FSDP 128, torch.compile": (128, COMPILED, 62.0),
    "FSDP 8, torch.compile, float8": (8, (*COMPILED, *FLOAT8), 76.8),
    "FSDP 128, torch.compile, float8": (128, (*COMPILED, *FLOAT8), 61.8),
    "FSDP 8, 32,768 tokens": (8, (*FULL, "--training.seq_len", "32768"), 83.9),
    "FSDP 4, context parallel 2, 65,536 tokens": (
        8,
        (*FULL, "--training.seq_len", "65536", "--experimental.context_parallel_degree", "2"),
        84.2,
    ),
}
"""Number of GPUs, torchtitan's arguments, and the GiB that its authors published."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure and its simulation; seconds of all runs together on a shared machine."""

    layout: str
    num_gpus: int
    arguments: str
    torch: str
    published_gib: float
    simulated_gib: float | None
    difference_percent: float | None
    allocated_gib: float | None
    verdict: str
    with_values: bool
    seconds: float


def run(layout: str, python: Path, checkout: Path, tokenizer: Path) -> Row:
    """Simulate the training script as one rank of a published run."""
    num_gpus, arguments, published_gib = CASES[layout]
    fixed = ("--job.config_file", "train_configs/llama3_8b.toml", "--training.dataset", "c4_test")
    script = (str(checkout / "train.py"), *fixed, "--model.tokenizer_path", str(tokenizer), *arguments)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = simulate(
            Simulate(
                command=(str(python), "-c", WITHOUT_CUDNN_ATTENTION, *script),
                card=find_card("h200"),
                world_size=num_gpus,
            ),
            Path(folder),
            may_need_values=True,
            finds_smallest=False,
        )
    one = found.largest
    simulated_gib = None if one is None else one.peak_reserved_bytes / GIB
    return Row(
        layout=layout,
        num_gpus=num_gpus,
        arguments=" ".join(arguments),
        torch=found.assumptions.get("torch", ""),
        published_gib=published_gib,
        simulated_gib=None if simulated_gib is None else round(simulated_gib, 2),
        difference_percent=None if simulated_gib is None else round(100 * (simulated_gib / published_gib - 1), 2),
        allocated_gib=None if one is None else round(one.peak_allocated_bytes / GIB, 2),
        verdict=found.verdict.value,
        with_values=found.with_values,
        seconds=round(time.monotonic() - begin, 1),
    )


def main() -> None:
    """Run what the table does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    for name in ("python", "checkout", "tokenizer"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    table, python, checkout = arguments.table.absolute(), arguments.python.absolute(), arguments.checkout.absolute()
    tokenizer = arguments.tokenizer.absolute()
    os.chdir(checkout)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    add_missing(table, Row, CASES, lambda layout: run(layout, python, checkout, tokenizer))


if __name__ == "__main__":
    main()
