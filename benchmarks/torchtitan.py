"""torchtitan's published memory and speed of Llama 3.1 on many GPUs, and what one simulated rank of as many says.

    python benchmarks/torchtitan.py TABLE.csv --python ENVIRONMENT/bin/python --checkout TORCHTITAN --tokenizer FILE

It appends the rows that the table does not have, in GiB of reserved memory, as torchtitan prints it, and in tokens a
second of one GPU. These are estimated from the work of an optimizer step with the rates of an H100 and its machines'
links, of which nothing was fitted to torchtitan's figures. The interpreter is
of an environment with torch's CUDA build and what torchtitan needs; the checkout is of commit 9dec370 (December 2024),
and its training script is not changed; FILE is a tokenizer of Llama 3's size, and the checkout's data set c4_test any
text. Two settings were chosen after seeing the published memory: attention without cuDNN's kernel, which torch came to
prefer only later, and no expandable segments. The card is an H200 throughout: theirs, an H100 of 96 GB with a limit of
500 W and 2.4 TB/s, is not known here.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rows import add_missing

from pipeline.base.units import MIB
from pipeline.planning.rates import step_time_on
from pipeline.prediction import cards
from pipeline.prediction.commands.simulation import WORK_HOOK, simulate
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
CONTEXT_PARALLEL = "--experimental.context_parallel_degree"


@dataclass(frozen=True)
class Published:
    """What its authors measured with these arguments of torchtitan."""

    num_gpus: int
    arguments: tuple[str, ...]
    gib: float
    tokens_per_second: float
    """Of one GPU."""
    tokens: int
    """Of one GPU in an optimizer step."""
    model: str = "8b"
    variables: Mapping[str, str] = field(default_factory=dict)


def _long(num_shards: int, gib: float, tokens_per_second: float) -> tuple[str, Published]:
    """Return a row of table 2: 8 GPUs, of which those that have no shard of their own share the sequences."""
    num_parts = 8 // num_shards
    length = num_parts * LENGTH_OF_PART
    arguments = (*FULL, "--training.seq_len", str(length), CONTEXT_PARALLEL, str(num_parts))
    name = f"FSDP {num_shards}, context parallel {num_parts}, {length:,} tokens"
    return name, Published(8, arguments, gib, tokens_per_second, LENGTH_OF_PART)


LENGTH_OF_PART = 32768
CASES = {
    "FSDP 8": Published(8, SELECTIVE, 82.4, 5762, 2 * 8192),
    "FSDP 128": Published(128, SELECTIVE, 67.0, 5605, 2 * 8192),
    "FSDP 8, torch.compile": Published(8, COMPILED, 77.0, 6667, 2 * 8192),
    "FSDP 128, torch.compile": Published(128, COMPILED, 62.0, 6514, 2 * 8192),
    "FSDP 8, torch.compile, float8": Published(8, (*COMPILED, *FLOAT8), 76.8, 8532, 2 * 8192),
    "FSDP 128, torch.compile, float8": Published(128, (*COMPILED, *FLOAT8), 61.8, 8380, 2 * 8192),
    **dict(_long(*row) for row in ((8, 83.9, 3890), (4, 84.2, 2540), (2, 84.0, 1071), (1, 84.5, 548))),
    "FSDP 32, tensor parallel 8": Published(
        256,
        (*FULL, "--training.batch_size", "16", "--training.tensor_parallel_degree", "8"),
        71.9,
        829,
        16 * 8192 // 8,
        model="70b",
        variables={"TORCHINDUCTOR_SIZE_ASSERTS": "0"},  # those of torch 2.13 fail for a functional collective
    ),
}
"""By layout."""


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
    published_tokens_per_second: float
    estimated_tokens_per_second: float | None
    overlapped_seconds: float | None
    """Of an optimizer step, if all overlaps that ranks send while they compute."""
    serial_seconds: float | None
    verdict: str
    with_values: bool
    seconds: float


def run(layout: str, python: Path, checkout: Path, tokenizer: Path) -> Row:
    """Simulate the training script as one rank of a published run."""
    published = CASES[layout]
    fixed = ("--job.config_file", f"train_configs/llama3_{published.model}.toml", "--training.dataset", "c4_test")
    script = (str(checkout / "train.py"), *fixed, "--model.tokenizer_path", str(tokenizer), *published.arguments)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = simulate(
            Simulate(
                command=(str(python), "-c", WITHOUT_CUDNN_ATTENTION, *script),
                card=find_card("h200"),
                world_size=published.num_gpus,
                variables=published.variables,
                hook=WORK_HOOK,
            ),
            Path(folder),
            may_need_values=True,
            finds_smallest=False,
        )
    one, time_of_step = found.largest, step_time_on(cards.find_hardware("h100"), found.passes_work, found.update_work)
    simulated_gib = None if one is None else one.peak_reserved_bytes / GIB
    return Row(
        layout=layout,
        num_gpus=published.num_gpus,
        arguments=" ".join(published.arguments),
        torch=found.assumptions.get("torch", ""),
        published_gib=published.gib,
        simulated_gib=None if simulated_gib is None else round(simulated_gib, 2),
        difference_percent=None if simulated_gib is None else round(100 * (simulated_gib / published.gib - 1), 2),
        allocated_gib=None if one is None else round(one.peak_allocated_bytes / GIB, 2),
        published_tokens_per_second=published.tokens_per_second,
        estimated_tokens_per_second=time_of_step and round(published.tokens / time_of_step.seconds),
        overlapped_seconds=time_of_step and round(time_of_step.overlapped_seconds, 3),
        serial_seconds=time_of_step and round(time_of_step.serial_seconds, 3),
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
