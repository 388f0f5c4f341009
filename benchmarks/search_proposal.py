"""CPU seconds of a proposal of the predictive search in a large space, after each number of measurements.

    python benchmarks/search_proposal.py                  writes search_proposal_<date>.md
    python benchmarks/search_proposal.py --tiny --folder F

The configurations are made up: a work and a peak for each value of eight dimensions, as many as a GPU's space has. The
measured ones follow the time model with a residual and noise, and are those that the search proposes.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product

from exit_code import exit_code_of, files_parser

from pipeline.config.space import Choice
from pipeline.memory.device import find_device
from pipeline.memory.work import ATTENTION, Work
from pipeline.runtime.environment import environment
from pipeline.searching.acquisition import Rules, evaluate
from pipeline.searching.candidates import Candidate
from pipeline.searching.measurements import Measurements

BATCH, TOKENS = 192, 1024
SPACE: Mapping[str, Sequence[str | int]] = {
    "micro_batch_size": (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96),
    "checkpointing": ("none", "every_layer", "every_2_layers", "every_4_layers", "attention_saved", "offloaded"),
    "precision": ("fp32", "bf16", "tf32"),
    "loss_kernel": ("full", "chunked", "fused"),
    "activation_offloading": ("no", "yes"),
    "optimizer_in_backward": ("no", "yes"),
    "attention": ("eager", "sdpa"),
    "gelu": ("model", "fused"),
}
TYPES = {"fp32": "float32", "bf16": "bfloat16", "tf32": "tf32"}
NUM_CONFIGURATIONS, NUM_MEASUREMENTS = 5000, 16
RESIDUAL, NOISE = 0.05, 0.01
BUDGET_BYTES = 24 * 2**30


def made_up(choice: Choice) -> Candidate:
    """Return a configuration whose values change its work and its peak each by a fraction."""
    size = int(choice["micro_batch_size"])  # type: ignore[arg-type]
    others = {name: random.Random(f"{name} {value}") for name, value in choice.items() if name != "micro_batch_size"}  # noqa: S311
    more, moved, peak = (math.prod(1 + 0.3 * one.random() for one in others.values()) for _ in range(3))
    peak_bytes, name = int(2**30 * (4 + 0.5 * size * peak)), TYPES[str(choice["precision"])]
    of_attention = {name + ATTENTION: 1e11 * size} if choice["attention"] == "sdpa" else {}
    return Candidate(
        choice=choice,
        micro_batch_size=size,
        num_passes=BATCH // size,
        num_tokens=BATCH * TOKENS,
        pass_work=Work({name: 1e12 * size * more, **of_attention}, 1e10 * size * moved, 2000 * more),
        update_work=Work(moved_bytes=4e9, num_kernels=50),
        predicted_bytes=peak_bytes,
    )


def log_seconds(candidate: Candidate) -> float:
    """Return the logarithm of the measured seconds per token of a made-up card."""
    one = candidate.pass_work
    kernels, bytes_moved = one.num_kernels * 1e-5, one.moved_bytes / 1e12
    seconds = max(kernels, one.flops / (2e14 if "float32" not in one.matrix_flops else 5e13) + bytes_moved)
    error = random.Random(repr(candidate.choice))  # noqa: S311
    return math.log(candidate.num_passes * seconds / candidate.num_tokens) + error.gauss(0, RESIDUAL + NOISE)


def cpu_seconds(candidates: Sequence[Candidate], num_measurements: int) -> list[float]:
    """Return the CPU seconds of each proposal."""
    rules, measured, seconds = Rules(budget_bytes=BUDGET_BYTES, kind="cuda"), dict[int, float](), list[float]()
    while len(seconds) <= num_measurements:
        started = time.process_time()
        acquisition = evaluate(candidates, _measurements(candidates, measured), rules)
        seconds.append(time.process_time() - started)
        number = acquisition.best_remaining
        assert number is not None  # there are more that fit than measurements
        measured[number] = log_seconds(candidates[number])
    return seconds


def _measurements(candidates: Sequence[Candidate], log_seconds: Mapping[int, float]) -> Measurements:
    return Measurements(
        runs={number: [one] for number, one in log_seconds.items()},
        peak_bytes={number: float(candidates[number].predicted_bytes or 0) for number in log_seconds},
        over_budget=frozenset(),
        failed=frozenset(),
        running=frozenset(),
    )


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and write the table; return the exit code, as exit_code_of() does."""
    parser = files_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="few configurations, to try this script out")
    given = parser.parse_args(words)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> int:
    values = list(SPACE.values())
    choices = [dict(zip(SPACE, choice, strict=True)) for choice in product(*values)]
    random.Random(0).shuffle(choices)  # noqa: S311
    candidates = [made_up(choice) for choice in choices[: 200 if given.tiny else NUM_CONFIGURATIONS]]
    seconds = cpu_seconds(candidates, 5 if given.tiny else NUM_MEASUREMENTS)
    about = environment(find_device("cpu"))
    (given.folder / f"search_proposal_{given.date}.md").write_text(
        "\n".join(
            [
                f"# CPU seconds of a proposal among {len(candidates):,} configurations",
                "",
                f"Written by `python benchmarks/search_proposal.py` on {about['device_name']}, one thread, "
                f"numpy in float64; at most {max(seconds):.2f} s.",
                "",
                "| measurements | CPU seconds |",
                "|---:|---:|",
                *(f"| {number} | {one:.2f} |" for number, one in enumerate(seconds)),
                "",
            ]
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
