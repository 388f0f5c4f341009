"""How long `fitproof check` takes for models of three sizes, from its start to its exit code.

    python benchmarks/check_times.py TABLE.csv --python ENVIRONMENT/bin/python

Each row is REPEATS checks of three optimizer steps against a limit, one after the other, after one that is not counted
and compiles the card's library. The interpreter is of an environment with torch's CUDA build and transformers.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rows import add_missing

from pipeline.base.units import MIB

REPEATS = 3
TRAINING = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

SHAPES = {
    "gpt2": (GPT2LMHeadModel, GPT2Config()),
    "gpt2-xl": (GPT2LMHeadModel, GPT2Config(n_embd=1600, n_layer=48, n_head=25)),
    "llama-3.1-8b": (
        LlamaForCausalLM,
        LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                    num_attention_heads=32, num_key_value_heads=8),
    ),
}
kind, shape = SHAPES[sys.argv[1]]
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = kind(shape)
print(sum(one.numel() for one in model.parameters()))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
tokens = torch.zeros(1, 1024, dtype=torch.long, device="cuda")
while True:
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CASES = {"gpt2": "t4", "gpt2-xl": "a100", "llama-3.1-8b": "h200"}
"""The card of each model."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The times of one model."""

    model: str
    parameters_millions: float
    card: str
    peak_allocated_mib: float
    seconds_median: float
    seconds_least: float
    seconds_most: float
    processor_seconds_median: float
    """Of all processes together: what a machine that is not shared would need on one core."""
    load_average: float
    """Processes that were running or waiting, in the last minute of the machine, which was shared."""
    date: str
    processor: str
    num_cores: int
    python: str
    torch: str
    transformers: str


def run(model: str, python: Path) -> Row:
    """Check the training of a model several times."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(TRAINING)
        command = [sys.executable, "-m", "fitproof", "check", "--gpu", CASES[model], "--max_reserved", "100%", "--json"]
        words = [*command, "--", str(python), str(script), model]
        subprocess.run(words, capture_output=True, check=True)
        wall, processor = [], []
        for _ in range(REPEATS):
            begin, used = time.monotonic(), _processor_seconds()
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            wall.append(time.monotonic() - begin)
            processor.append(_processor_seconds() - used)
    found = json.loads(done.stdout)
    [parameters, *_] = [int(line) for line in done.stderr.splitlines() if line.isdecimal()]
    return Row(
        model=model,
        parameters_millions=round(parameters / 1e6, 1),
        card=CASES[model],
        peak_allocated_mib=round(found["peak"]["allocated_bytes"] / MIB, 1),
        seconds_median=round(statistics.median(wall), 1),
        seconds_least=round(min(wall), 1),
        seconds_most=round(max(wall), 1),
        processor_seconds_median=round(statistics.median(processor), 1),
        load_average=round(os.getloadavg()[0], 1),
        date=time.strftime("%Y-%m-%d"),
        processor=_processor(),
        num_cores=os.cpu_count() or 0,
        python=platform.python_version(),
        torch=found["assumptions"]["torch"],
        transformers=version("transformers"),
    )


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _processor() -> str:
    """Return the name of the processor; that of its architecture where the machine does not say it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Run what the table does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    arguments = parser.parse_args()
    add_missing(arguments.table, Row, CASES, lambda model: run(model, arguments.python.absolute()))


if __name__ == "__main__":
    main()
