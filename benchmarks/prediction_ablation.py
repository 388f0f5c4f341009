"""What each shortcut of prediction saves: all of them, all but one, one alone, none.

    python benchmarks/prediction_ablation.py           writes benchmarks/prediction_ablation_<date>.md
    python benchmarks/prediction_ablation.py --tiny    prints the same for small spaces

Two spaces: gpt2-medium on an H200 (the micro-batches that divide 2880, four checkpointing policies, three precisions:
504 configurations), and the default search space on a CPU (30 configurations of gpt2-nano). Every row is measured in a
new process with an empty cache, which predicts one configuration after the other. What is reported are seconds of
processor time (user and system), which other load on the machine disturbs less than it does the clock.
"""

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.base.contracts import Hardware
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.settings import nested
from pipeline.memory.device import hardware_of
from pipeline.memory.recorder import passed_on
from pipeline.prediction import fake_device, trace
from pipeline.prediction.cards import find_card
from pipeline.prediction.families import RECORDED_SIZES
from pipeline.prediction.predict import predict
from pipeline.prediction.predict_all import rounds
from pipeline.runtime.environment import environment

FOLDER = Path(__file__).parent
SHOWN = ("device_name", "cores", "host_memory_mib", "system", "python", "torch", "transformers")
SHORTCUTS = ("accumulation", "micro-batch", "operators")
POLICIES = ("none", "every_layer", "every_2_layers", "every_4_layers")
PRECISIONS = ("fp32", "fp16", "bf16")
BATCH, CPU_BATCH, TINY_BATCH = 2880, 16, 24
NUM_GROUPS = 3
"""Pairs of a policy and a precision that are measured on the GPU, of twelve; seconds are scaled to twelve."""
NUM_SIZES = 6
"""Micro-batch sizes that are measured in each group, of those that the shortcut extrapolates; seconds are scaled."""
FEW_PASSES = (1, 2, 4)
"""Numbers of micro-batches that are measured where each is traced; seconds for others lie on the line through them."""
MANY = 5000
"""Configurations that a later space has."""


class UncachedMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """torch's own fake tensors, with torch's own cache."""

    run = staticmethod(passed_on)

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


@contextmanager
def only(shortcuts: Sequence[str]) -> Iterator[None]:
    """Switch all other shortcuts off."""
    off = set(SHORTCUTS) - set(shortcuts)
    with ExitStack() as stack:
        for name, owner, attribute, replacement in (
            ("accumulation", trace, "STEADY_STEPS", 10**9),
            ("micro-batch", trace, "_from_other_sizes", lambda *_: None),
            ("operators", fake_device, "CachedFakeTensorMode", UncachedMode),
        ):
            if name in off:
                stack.enter_context(patch.object(owner, attribute, replacement))
        yield


def divisors(number: int) -> list[int]:
    """Return all divisors."""
    return [size for size in range(1, number + 1) if number % size == 0]


def on_gpu(batch: int, sizes: Sequence[int], groups: Sequence[tuple[str, str]], model: str) -> list[Experiment]:
    """Return the experiments of the large space that are in these groups."""
    return [
        make_experiment(
            nested(
                {
                    "device": "cpu",
                    "model": model,
                    "sequence_length": 1024,
                    "effective_batch_size": batch,
                    "micro_batch_size": size,
                    "checkpointing": policy,
                    "precision": precision,
                }
            ),
            "plan",
        )
        for (policy, precision), size in product(groups, sizes)
    ]


def on_cpu() -> list[Experiment]:
    """Return the experiments of the default search space on a CPU."""
    return [
        make_experiment(
            nested(
                {
                    "device": "cpu",
                    "model": "gpt2-nano",
                    "effective_batch_size": CPU_BATCH,
                    "micro_batch_size": size,
                    "checkpointing": policy,
                    "precision": precision,
                }
            ),
            "search",
        )
        for policy, precision, size in product(POLICIES[:3], ("fp32", "bf16"), divisors(CPU_BATCH))
    ]


def seconds_of(experiments: list[Experiment], target: Hardware) -> float:
    """Return the processor seconds of their predictions, once their corpus is tokenized."""
    experiments[0].read_corpus()
    start = time.process_time()
    for number in chain.from_iterable(chain.from_iterable(rounds(experiments, 1))):
        predict(experiments[number], target)
    return time.process_time() - start


def measure(shortcuts: Sequence[str], space: str, tiny: bool) -> dict[str, float]:
    """Return the processor seconds of a whole space, scaled where it is sampled, and how many were predicted for it."""
    card, processor = find_card("h200"), hardware_of(torch.device("cpu"))
    model, batch = ("gpt2", TINY_BATCH) if tiny else ("gpt2-medium", BATCH)
    groups = random.Random(0).sample(  # noqa: S311  a sample, no secret
        list(product(POLICIES, PRECISIONS)), 1 if tiny else NUM_GROUPS
    )
    share = len(groups) / (len(POLICIES) * len(PRECISIONS))
    with only(shortcuts):
        predict(
            make_experiment(nested({"device": "cpu", "model": "encoder_stack", "corpus": "random_vectors"}), "plan"),
            processor,
        )
        if space == "cpu":
            experiments = on_cpu()
            return {"seconds": seconds_of(experiments, processor), "predicted": len(experiments)}
        sizes = divisors(batch)
        recorded = [size for size in sizes if size <= max(RECORDED_SIZES) and size.bit_count() == 1]
        others = [size for size in sizes if size not in recorded]
        chosen = random.Random(1).sample(others, min(NUM_SIZES, len(others)))  # noqa: S311  a sample, no secret
        if "accumulation" in shortcuts:
            first, second = (on_gpu(batch, part, groups, model) for part in (recorded, chosen))
            whole = seconds_of(first, card) + seconds_of(second, card) * len(others) / len(chosen)
            return {"seconds": whole / share, "predicted": len(first) + len(second)}
        few = [seconds_of(on_gpu(passes, [1], groups, model), card) for passes in FEW_PASSES]
        slope, start = line(FEW_PASSES, few)
        whole = sum(start + slope * passes for passes in sizes)  # a size's passes are a divisor, too
        return {"seconds": whole / share, "predicted": len(FEW_PASSES) * len(groups)}


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return slope and intercept of the line of least squares."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)
    return slope, mean_y - slope * mean_x


def rows() -> dict[str, tuple[str, ...]]:
    """Return the shortcuts of each row of the table, by its name."""
    return {
        "all": SHORTCUTS,
        **{f"all but {one}": tuple(name for name in SHORTCUTS if name != one) for one in SHORTCUTS},
        **{f"{one} alone": (one,) for one in SHORTCUTS},
        "none": (),
    }


def in_new_process(shortcuts: Sequence[str], space: str, tiny: bool) -> dict[str, float]:
    """Return what measure() does in a new process with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            __file__,
            "--space",
            space,
            "--only",
            ",".join(shortcuts),
            *(["--tiny"] if tiny else []),
        ]
        done = subprocess.run(
            words, env={**os.environ, "FITPROOF_CACHE": folder}, stdout=subprocess.PIPE, text=True, check=True
        )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def page(results: dict[str, dict[str, dict[str, float]]], date: str) -> str:
    """Return the table as Markdown."""
    about = environment(torch.device("cpu"))
    few = ", ".join(map(str, FEW_PASSES))
    num_gpu, num_cpu = len(divisors(BATCH)) * 12, int(results["all"]["cpu"]["predicted"])

    def cells(name: str, spaces: dict[str, dict[str, float]]) -> str:
        gpu, cpu = spaces["gpu"], spaces["cpu"]
        many = gpu["seconds"] * MANY / num_gpu / 2
        return f"| {name} | {gpu['seconds']:,.0f} | {gpu['predicted']:.0f} | {many / 60:,.1f} | {cpu['seconds']:,.1f} |"

    return "\n".join(
        [
            f"# What each shortcut of prediction saves, {date}",
            "",
            "Written by `python benchmarks/prediction_ablation.py`; seconds of processor time (user and system) of one "
            "process, from an empty cache, start-up left out, while other programs used the machine too.",
            "",
            "| what | value |",
            "|---|---|",
            *(f"| {name} | {about[name]} |" for name in SHOWN if name in about),
            "",
            f"The large space is gpt2-medium on an H200: {num_gpu} configurations. Of its 12 pairs of "
            f"checkpointing policy and precision, {NUM_GROUPS} drawn at random are predicted, each at micro-batch "
            f"1, 2, 4 and 8 and at {NUM_SIZES} of the other sizes, drawn at random too, and the seconds are "
            "scaled. Without the shortcut for accumulation the seconds of a configuration with n micro-batches "
            f"are those of the line through n = {few}. The column for {MANY:,} configurations is arithmetic: the "
            f"seconds of the large space times {MANY:,} / {num_gpu}, on two cores. The small space is the default "
            f"search on a CPU: all {num_cpu} configurations of gpt2-nano are predicted. *Operators* off means "
            "torch's own FakeTensorMode with torch's own cache.",
            "",
            f"| shortcuts | {num_gpu} configurations, s | of them predicted | {MANY:,} on 2 cores, minutes | "
            f"{num_cpu} configurations, s |",
            "|---|---:|---:|---:|---:|",
            *(cells(name, spaces) for name, spaces in results.items()),
            "",
        ]
    )


def main() -> None:
    """Measure one row, or all of them and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small spaces, to try this script out")
    parser.add_argument("--space", choices=["gpu", "cpu"], help="measure one row on this space, and print it")
    parser.add_argument("--only", default="", help="the shortcuts of that row, separated by commas")
    chosen = parser.parse_args()
    if chosen.space:
        print(json.dumps(measure(tuple(filter(None, chosen.only.split(","))), chosen.space, chosen.tiny)))
        return
    results: dict[str, dict[str, Any]] = {}
    for name, shortcuts in rows().items():
        results[name] = {space: in_new_process(shortcuts, space, chosen.tiny) for space in ("gpu", "cpu")}
        print(name, results[name], file=sys.stderr, flush=True)
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    text = page(results, date)
    print(text)
    if not chosen.tiny:
        (FOLDER / f"prediction_ablation_{date}.md").write_text(text)


if __name__ == "__main__":
    main()
