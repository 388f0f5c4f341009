"""How long predictions take: single configurations on one core, and a whole space of one model on all of them.

    python benchmarks/prediction_speed.py           writes benchmarks/prediction_speed_<date>.md
    python benchmarks/prediction_speed.py --tiny    prints the same for one model and a space of a few
    python benchmarks/prediction_speed.py --levers [--batch 32]    prints that of the default space of `plan` alone

Every time is from an empty cache, for an H200, at 1024 tokens. Single configurations are predicted after a first one
of another size, so that start-up does not count. The whole space is predicted as a command does it: the processes start
while the experiments are made, and both count.
"""

import argparse
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pipeline.base.files import cache_folder
from pipeline.config.configurations import Configurations, why_refused
from pipeline.config.entry_points import yaml_file
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.settings import nested
from pipeline.config.space import SpaceSettings, make_space
from pipeline.config.variants import read_yaml
from pipeline.prediction import trace
from pipeline.prediction.cached_operators import clear_cache
from pipeline.prediction.cards import find_card
from pipeline.prediction.predict import predict
from pipeline.prediction.predict_all import predict_all
from pipeline.runtime.environment import environment
from pipeline.runtime.fork_server import start_server

FOLDER = Path(__file__).parent
SHOWN = ("device_name", "cores", "host_memory_mib", "system", "python", "torch", "transformers")
COMMON = {"device": "cpu", "sequence_length": 1024}
MODELS = ("gpt2", "gpt2-medium", "gpt2-xl", "llama-7b")
POLICIES = ("none", "every_layer", "every_2_layers", "every_4_layers")
PRECISIONS = ("fp32", "fp16", "bf16")
REPEATS = 3
BATCH, TINY_BATCH = 2880, 8
"""Effective batches of the whole space, whose micro-batches are all divisors."""
LEVERS_BATCH = 144
"""The effective batch at which the default space of `plan` has more than 5,000 configurations of gpt2-medium."""


def empty_cache() -> None:
    """Remove all cached predictions and operator results; the prepared text stays."""
    clear_cache()
    trace.forget()
    for file in cache_folder().glob("trace-*"):
        file.unlink()


def experiment_of(**settings: Any) -> Experiment:
    """Return the Experiment with these settings and the common ones."""
    return make_experiment(nested({**COMMON, **settings}), "plan")


def single(**settings: Any) -> tuple[float, float]:
    """Return the seconds of processor time of a prediction, and of the same again."""
    experiment, card = experiment_of(**settings), find_card("h200")
    seconds = []
    empty_cache()
    for _ in range(2):
        start = time.process_time()
        predict(experiment, card)
        seconds.append(time.process_time() - start)
    return seconds[0], seconds[1]


def whole_space(model: str, batch: int) -> tuple[int, float]:
    """Return how many configurations there are, and the seconds by the clock to make and predict them all."""
    empty_cache()
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    start = time.perf_counter()
    start_server()
    experiments = [
        experiment_of(
            model=model, effective_batch_size=batch, micro_batch_size=size, checkpointing=policy, precision=precision
        )
        for size, policy, precision in product(sizes, POLICIES, PRECISIONS)
    ]
    done = list(predict_all(experiments, find_card("h200")))
    return len(done), time.perf_counter() - start


def all_levers(model: str, batch: int) -> tuple[int, float]:
    """Return the same for the default space of `plan`, whose configurations are also checked."""
    empty_cache()
    card, values = find_card("h200"), {**COMMON, "model": model, "effective_batch_size": batch}
    start = time.perf_counter()
    start_server()
    settings = SpaceSettings(space=read_yaml(yaml_file("plan"))["space"])
    configurations = Configurations(values, "plan")
    space, _ = make_space(settings, batch, {}, card).without(
        lambda choice: why_refused(configurations.experiment(choice), choice, card, settings.mathematics)
    )
    done = list(predict_all([configurations.experiment(choice) for choice in space.choices], card))
    return len(done), time.perf_counter() - start


def in_fresh_process(measure: Callable[[str, int], tuple[int, float]], model: str, batch: int) -> tuple[int, float]:
    """Return what a function of a whole space does, where no server of processes runs yet."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, model, batch).result()


def singles(models: tuple[str, ...]) -> Iterator[Mapping[str, str]]:
    """Yield a line for each model and policy."""
    predict(experiment_of(model="gpt2", micro_batch_size=1), find_card("h200"))  # start-up
    for model, policy in product(models, POLICIES[:2]):
        shared = {"model": model, "checkpointing": policy, "precision": "bf16", "micro_batch_size": 8}
        one, more = ([single(**shared, accumulation_steps=steps) for _ in range(REPEATS)] for steps in (1, 4))
        yield {
            "model": model,
            "checkpointing": policy,
            "1 micro-batch a step": _spread([first for first, _ in one]),
            "4 micro-batches": _spread([first for first, _ in more]),
            "again, in the same process": _spread([again for _, again in (*one, *more)]),
        }


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measure all, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small part, to try this script out")
    parser.add_argument("--levers", action="store_true", help="the default space of `plan` alone")
    parser.add_argument("--batch", type=int, default=LEVERS_BATCH, help="the effective batch of that space")
    given = parser.parse_args()
    tiny = given.tiny
    model, batch = ("gpt2", TINY_BATCH) if tiny else ("gpt2-medium", BATCH)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, FITPROOF_CACHE=folder):
        experiment_of(model=model).read_corpus()
        if given.levers:
            count, seconds = in_fresh_process(all_levers, model, given.batch)
            print(f"{count} configurations of {model} with all levers, batch {given.batch}: {seconds:.1f} s")
            return
        levers = in_fresh_process(all_levers, model, batch if tiny else given.batch)
        runs = [in_fresh_process(whole_space, model, batch) for _ in range(1 if tiny else REPEATS)]
        lines = list(singles(("gpt2",) if tiny else MODELS))
    date, about = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}", environment(torch.device("cpu"))
    text = "\n".join(
        [
            f"# The speed of predictions, {date}",
            "",
            "Written by `python benchmarks/prediction_speed.py`: for an H200, 1024 tokens, from an empty cache.",
            "",
            "| what | value |",
            "|---|---|",
            *(f"| {name} | {about[name]} |" for name in SHOWN if name in about),
            "",
            f"**A whole space**: {runs[0][0]} configurations of {model} (the micro-batches that divide {batch}, "
            f"{len(POLICIES)} checkpointing policies, {len(PRECISIONS)} precisions), a process a core, by the clock: "
            f"{', '.join(f'{seconds:.1f} s' for _, seconds in runs)}.",
            "",
            f"**The default space of `plan`**: {levers[0]} configurations of {model} (all levers, effective batch "
            f"{batch if tiny else given.batch}), checked and predicted, by the clock: {levers[1]:.1f} s.",
            "",
            "**Single configurations**: micro-batch 8, bf16; processor seconds on one core, median and range of "
            f"{REPEATS}.",
            "",
            f"| {' | '.join(lines[0])} |",
            f"|{'---|' * len(lines[0])}",
            *(f"| {' | '.join(line.values())} |" for line in lines),
            "",
        ]
    )
    print(text)
    if not tiny:
        (FOLDER / f"prediction_speed_{date}.md").write_text(text)


if __name__ == "__main__":
    main()
