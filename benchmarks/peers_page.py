"""The page of benchmarks/peers.py: conditions, metrics and losses, from the rows of its file."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from overhead import table
from peer_run import BARE, FITPROOF
from peers_figures import Name, Row, by_peer, numbers, peak_mib, speed

from pipeline.base.results import Outcome
from pipeline.config.experiment import Experiment

TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2}
"""Largest difference between two peers' losses of one step that the precision accounts for."""
HOW = """
A round has one run of each, in random order, each in a process of its own, forked from one that has loaded torch and
all frameworks. Alike in all: the weights (one seed, dropout 0), the rows and their order, the precision, the
micro-batch, the accumulation, the checkpointing (transformers' own switch), fused AdamW on all parameters, the learning
rate's warm-up, and clipping to norm 1. The clock is read at the end of each step of the optimizer, by torch's hook for
all optimizers: a step's time includes reading its rows. The first {left_out} of {num_steps} steps are left out;
{meter}.
Seconds per step are a run's median; a ratio is that of two runs of one round, its figure is the median over the rounds,
and its 95 % interval is a bootstrap over them. Above 1 is faster.

Switched off: in Trainer logging (its filter of infinite losses, too), saving, reports and the progress bar; in
Lightning the logger, checkpoints of weights, progress bar and model summary; Accelerate has no tracker by default.
Fitproof runs as in `main`: it reads every step's loss, gradient norm and time, and sends them to the process that
tracks it. Lightning refuses to clip under autocast where the optimizer is fused; its hook for clipping does it here.
"""
ON_CPU = "the meter watches two of them"
ON_CUDA = "peak memory is the caching allocator's, over the whole run"


def page(
    rows: Sequence[Row],
    experiments: Mapping[Name, Experiment],
    about: Mapping[str, str],
    title: str,
    command: str,
    num_left: int,
) -> str:
    """Return the page: conditions, and for each model and configuration its metrics and losses."""
    settings = next(iter(experiments.values())).settings
    meter = ON_CPU if settings.device == "cpu" else ON_CUDA
    how = HOW.format(left_out=settings.timing_warmup_steps, num_steps=settings.num_steps, meter=meter)
    left = f" {num_left} runs are left: the same command goes on." if num_left else ""
    lines = [f"# {title}", "", f"Written by `{command}`.{left}", ""]
    lines += table(("what", "value"), list(about.items()))
    lines += [how.strip(), ""]
    for name, experiment in experiments.items():
        runs = by_peer(rows, name)
        lines += [f"## {name[0]}, {name[1]}", "", described(experiment), ""]
        lines += table(HEADS, list(metrics(rows, name, runs)))
        if BARE in runs:
            tolerance = TOLERANCES[experiment.settings.precision]
            lines += [f"Losses (tolerance {tolerance:g}): {'; '.join(agreements(runs, tolerance))}.", ""]
            lines += table(("loss of step", *runs), list(side_by_side(runs)))
    return "\n".join(lines)


HEADS = (
    "peer",
    "runs",
    "s/step",
    "least to greatest",
    "tokens/s",
    "speed over the bare loop",
    "Fitproof's speed over it",
    "peak MiB",
    "over the bare loop's",
)


def described(experiment: Experiment) -> str:
    """Return a configuration in a sentence."""
    settings = experiment.settings
    return (
        f"{settings.precision}, micro-batch {settings.micro_batch_size} x {settings.accumulation_steps} accumulation "
        f"steps, {settings.sequence_length} tokens, {settings.sequences} rows, checkpointing {settings.checkpointing}."
    )


def metrics(rows: Sequence[Row], name: Name, runs: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, ...]]:
    """Yield a line of the table for each peer, and one for each run that did not complete."""
    for peer, of_peer in runs.items():
        seconds = [float(row["seconds_per_step"]) for row in of_peer]
        rate = statistics.median(float(row["tokens_per_second"]) for row in of_peer)
        peak = peak_mib(of_peer)
        yield (
            peer,
            str(len(of_peer)),
            f"{statistics.median(seconds):.4f}",
            f"{min(seconds):.4f} to {max(seconds):.4f}",
            f"{rate:,.0f}",
            str(speed(of_peer, runs.get(BARE, [])) or "") if peer != BARE else "",
            str(speed(runs.get(FITPROOF, []), of_peer) or "") if peer != FITPROOF else "",
            f"{peak:,.1f}",
            f"{peak / peak_mib(runs[BARE]):.3f}" if BARE in runs else "",
        )
    for row in rows:
        if (row["model"], row["configuration"]) == name and not Outcome(row["outcome"]).completed:
            yield (row["peer"], "", row["outcome"], *[""] * (len(HEADS) - 3))


def agreements(runs: Mapping[str, Sequence[Row]], tolerance: float) -> Iterator[str]:
    """Yield, for each peer, whether the losses of all its runs are the bare loop's, and why not."""
    for peer, of_peer in runs.items():
        if peer != BARE:
            worst = max(of_peer, key=lambda row: _largest_difference(row, runs[BARE][0]))
            yield f"{peer} {explained(worst, runs[BARE][0], tolerance)}"


def explained(row: Row, bare: Row, tolerance: float) -> str:
    """Return whether a run's losses are the bare loop's; where they are not, which other divisor explains them."""
    difference = _largest_difference(row, bare)
    if difference <= tolerance:
        return f"agrees within {difference:.2g}"
    factors = numbers(row, "tokens") / numbers(row, "targets")
    corrected = _largest_difference(row, bare, factors)
    if corrected <= tolerance:
        return (
            f"differs by up to {difference:.2g}, because it divides by the number of labels, of which each row's first "
            f"is no target: times labels over targets it agrees within {corrected:.2g}"
        )
    first, expected = numbers(row, "losses")[0], numbers(bare, "losses")[0]
    mean_of_means = float(bare["first_mean_of_means"])
    if abs(first - mean_of_means) <= min(tolerance, abs(first - expected)):
        return (
            f"differs by up to {difference:.2g}, because it takes the mean of the forward passes' means, however many "
            f"targets each has: its first loss is {first:.5f}; the bare loop's first forward passes give "
            f"{mean_of_means:.5f} as such a mean, and {expected:.5f} over all targets"
        )
    return f"differs by up to {difference:.2g}, and no other divisor explains it"


def _largest_difference(row: Row, bare: Row, factors: float | np.ndarray = 1.0) -> float:
    return float(np.abs(numbers(row, "losses") * factors - numbers(bare, "losses")).max())


def side_by_side(runs: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, ...]]:
    """Yield the losses of each peer's first run, step by step."""
    for number, losses in enumerate(zip(*(numbers(of_peer[0], "losses") for of_peer in runs.values()), strict=True), 1):
        yield (str(number), *(f"{loss:.5f}" for loss in losses))
