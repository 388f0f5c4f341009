"""What a step of GPT-2 medium costs on a simulated card: bare, and with what `simulate` records and computes.

    python benchmarks/simulated_speed.py --python ENVIRONMENT/bin/python    results: simulated_speed_2026-11-26.md

It prints seconds of one core for an optimizer step (micro-batch 4 x 1024, bf16 autocast, fused AdamW), the median of
STEPS after two. The interpreter is of an environment with torch's CUDA build and transformers.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from pipeline.simulation.cards import find_card
from pipeline.simulation.environment import environment
from pipeline.simulation.process import watch

STEPS = 12
TRAINING = f"""
import time, torch
from transformers import GPT2Config, GPT2LMHeadModel
shape = GPT2Config(n_embd=1024, n_layer=24, n_head=16)
with torch.device("cuda"):
    model = GPT2LMHeadModel(shape)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
tokens = torch.zeros(4, 1024, dtype=torch.long, device="cuda")
for step in range({STEPS} + 2):
    begin = time.process_time()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step >= 2:
        print(time.process_time() - begin, flush=True)
"""


def seconds_of_a_step(python: Path, *, is_watched: bool, has_values: bool) -> float:
    """Return the median processor time of an optimizer step."""
    with tempfile.TemporaryDirectory() as folder:
        hooks = [Path(watch.__file__)] if is_watched else []
        card = environment(
            find_card("h200"), python=python, report=Path(folder), values=has_values, hooks=hooks, base=os.environ
        )
        done = subprocess.run(
            [python, "-c", TRAINING], env={**os.environ, **card}, check=True, capture_output=True, text=True
        )
    return statistics.median(map(float, done.stdout.split()))


def main() -> None:
    """Print the seconds of each kind, and their ratio to the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True)
    python = parser.parse_args().python
    kinds = {
        "the card alone": (False, False),
        "with torch's memory history and phases": (True, False),
        "with values of small tensors": (True, True),
    }
    bare = 0.0
    for name, (is_watched, has_values) in kinds.items():
        seconds = seconds_of_a_step(python, is_watched=is_watched, has_values=has_values)
        bare = bare or seconds
        print(f"{name}: {1000 * seconds:.0f} ms, {seconds / bare:.2f} x")


if __name__ == "__main__":
    main()
