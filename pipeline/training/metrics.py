"""Summary metrics of runs, named as in MLflow; a metric without a value is left out."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.base.results import MemoryUse, Outcome, Result, StepRecord, limited_peak
from pipeline.base.units import MIB
from pipeline.training.timing import Timing

MOVING_AVERAGE_STEPS = 10
MEDIAN_CONFIDENCE = 0.95
AGAINST_BASELINE = (
    "memory_saving_percent",
    "time_overhead_percent",
    "time_overhead_low_percent",
    "time_overhead_high_percent",
    "speedup",
    "max_loss_difference",
)
"""Metrics that compare a run with the baseline."""
PASSES_PER_MICRO_BATCH = "passes_per_micro_batch"
OF_TIME = {"seconds_per_step": 1, "samples_per_second": -1, "tokens_per_second": -1}
"""Metrics of a run's median step, and the power of its time as which they grow."""

PREDICTION = "prediction"
"""The tag that says why a run has no prediction, or what to know of it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant or trial of a report."""

    comparison: str
    name: str
    is_baseline: bool
    params: Mapping[str, Any]
    """Every setting by its dotted name."""
    result: Result | None
    """None if it was skipped."""
    skipped: str | None
    metrics: Mapping[str, float]
    """Summary metrics, named as in MLflow."""
    note: str | None = None
    """What is to be said of it, whether it ran or not."""
    timings: tuple[Timing, ...] = ()
    """The time of each of its runs, the first one first; empty where no step was timed."""
    prediction: str | None = None
    """Why it has no prediction, or what that lacks; None if it was not predicted or lacks nothing."""

    @property
    def outcome(self) -> Outcome | None:
        """How its run ended; None if it was skipped."""
        return None if self.result is None else self.result.outcome

    @property
    def completed(self) -> bool:
        """Whether it ran to its end."""
        return self.outcome is not None and self.outcome.completed

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """Its optimizer steps; none if it was skipped."""
        return () if self.result is None else self.result.steps


@dataclass(frozen=True)
class Summary:
    """What a finished run gets in MLflow beside its result."""

    metrics: Mapping[str, float]
    prediction: str | None = None
    """As of a Row."""


def summarize(
    result: Result, effective_batch_size: int, timing_warmup_steps: int, tokens_per_position: float = 1.0
) -> dict[str, float]:
    """Return the summary metrics of a run; `tokens_per_position` is the typical share of tokens that is no padding.

    seconds_per_step is the median over the optimizer steps after the first `timing_warmup_steps`, and
    seconds_per_step_iqr their interquartile range; samples_per_second is computed from the median. tokens_per_second is
    computed from the median of the seconds per token with padding, so that it does not depend on which documents the
    timed steps of a short trial have. The share of padding is that of the same steps: in the first two it is larger
    than in any other.
    """
    metrics = {"seconds_total": result.seconds_total, "effective_batch_size": float(effective_batch_size)}
    if result.memory is not None:
        metrics |= _memory(result.memory)
    if result.steps:
        metrics |= _training(result.steps)
    typical = result.steps[timing_warmup_steps:]
    if padding := padding_percent(typical):
        metrics["padding_percent"] = padding
    timed = [record.seconds for record in typical]
    if timed:
        median = statistics.median(timed)
        metrics["seconds_per_step"] = median
        metrics["samples_per_second"] = effective_batch_size / median
        seconds_per_position = statistics.median(record.seconds / record.positions for record in typical)
        if typical[0].tokens is not None:
            metrics["tokens_per_second"] = tokens_per_position / seconds_per_position
    if len(timed) >= 2:
        low, _, high = statistics.quantiles(timed, n=4, method="inclusive")
        metrics["seconds_per_step_iqr"] = high - low
    for name in (PASSES_PER_MICRO_BATCH, "block_forwards_per_step", "eval_loss", "gradient_underflow_percent"):
        if (value := getattr(result.finished, name, None)) is not None:
            metrics[name] = float(value)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def speed_in(metrics: Mapping[str, float]) -> float | None:
    """Return the speed that a search compares: tokens per second, or samples where tokens are not counted."""
    return metrics.get("tokens_per_second", metrics.get("samples_per_second"))


def with_time(metrics: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return the metrics of a run whose median step takes `factor` times as long."""
    return {**metrics, **{name: metrics[name] * factor**power for name, power in OF_TIME.items() if name in metrics}}


def limited_peak_mib(metrics: Mapping[str, float]) -> float | None:
    """Return the peak that a budget limits, in MiB, from summary metrics; None if it was not measured."""
    return limited_peak(metrics.get("peak_allocated_mib"), metrics.get("peak_reserved_mib"))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return a confidence interval of the median, of at least 95 % for any distribution; None below six values.

    Its limits are two order statistics (David and Nagaraja, Order Statistics, 2003, section 7.1).
    """
    ordered, num = sorted(values), len(values)
    outside, rank = 2**-num, 0
    while 2 * outside <= 1 - MEDIAN_CONFIDENCE and 2 * rank < num:
        rank += 1
        outside += math.comb(num, rank) / 2**num
    return (ordered[rank - 1], ordered[num - rank]) if rank else None


def against_baseline(
    result: Result, metrics: Mapping[str, float], baseline: Result, baseline_metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics that compare a run with its baseline, but for their times: see time_differences.with_times().

    Memory is the peak of allocated bytes. The largest difference of the losses of a step is left out for runs of
    different effective batch sizes or of other steps; it is NaN if a loss is.
    """
    if not (result.outcome.completed and baseline.outcome.completed):
        return {}  # the peak of a run that did not complete is a lower bound
    compared = {}
    if memory := _both("peak_allocated_mib", metrics, baseline_metrics):
        compared["memory_saving_percent"] = 100 * (1 - memory[0] / memory[1])
    sizes = _both("effective_batch_size", metrics, baseline_metrics)
    steps, others = ([record.step for record in each.steps] for each in (result, baseline))
    if sizes and sizes[0] == sizes[1] and steps and steps == others:
        pairs = zip(result.steps, baseline.steps, strict=True)
        differences = [abs(one.loss - other.loss) for one, other in pairs]
        compared["max_loss_difference"] = math.nan if any(map(math.isnan, differences)) else max(differences)
    return compared


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Return the metrics of one optimizer step."""
    unit, amount = ("samples", record.positions) if record.tokens is None else ("tokens", record.tokens)
    metrics = {
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "seconds": record.seconds,
        f"{unit}_per_second": amount / record.seconds,
        "learning_rate": record.learning_rate,
    }
    if padding := padding_percent([record]):
        metrics["padding_percent"] = padding
    if record.loss_scale is not None:
        metrics["loss_scale"] = record.loss_scale
    if record.reserved_bytes is not None:
        metrics["reserved_mib"] = record.reserved_bytes / MIB
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def padding_percent(steps: Sequence[StepRecord]) -> float:
    """Return the percentage of the tokens of some optimizer steps that are padding; 0 without steps."""
    num_positions = sum(record.positions for record in steps)
    num_tokens = sum(record.positions if record.tokens is None else record.tokens for record in steps)
    return 100 * (1 - num_tokens / num_positions) if num_positions else 0.0


def finite(value: Any) -> Any:
    """Return the value with infinity and NaN, which JSON does not have, as strings."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def common_settings(params: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that are equal in all runs."""
    return {name: value for name, value in params[0].items() if all(name in p and p[name] == value for p in params)}


def moving_average(values: Sequence[float], window: int = MOVING_AVERAGE_STEPS) -> list[float]:
    """Return the mean of each value and up to `window` - 1 values before it."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _memory(memory: MemoryUse) -> dict[str, float]:
    peaks = {
        "peak_allocated_mib": memory.peak_allocated_bytes,
        "peak_reserved_mib": memory.peak_reserved_bytes,
        "peak_device_mib": memory.peak_device_bytes,
        "peak_process_mib": memory.peak_process_bytes,
        "peak_evaluation_mib": memory.peak_evaluation_bytes,
    }
    metrics = {name: size / MIB for name, size in peaks.items() if size is not None}
    if memory.allocation_retries is not None:
        metrics["allocation_retries"] = float(memory.allocation_retries)
    return metrics | dict(_phases(memory))


def _phases(memory: MemoryUse) -> Iterator[tuple[str, float]]:
    """Yield `allocated_after_load_mib`, `allocated_after_forward_1_mib`, ...; optimizer steps are counted from 1."""
    for phase in memory.phases:
        label = phase.phase if phase.phase == "load" else f"{phase.phase}_{phase.step + 1}"
        yield f"allocated_after_{label}_mib", phase.allocated_bytes / MIB


def _training(steps: Sequence[StepRecord]) -> dict[str, float]:
    losses = [record.loss for record in steps]
    norms = [record.grad_norm for record in steps if math.isfinite(record.grad_norm)]
    metrics = {
        "final_loss": losses[-1],
        "mean_loss": statistics.fmean(losses),
        "loss_std": statistics.pstdev(losses) if all(map(math.isfinite, losses)) else math.nan,
        "skipped_steps": float(sum(record.skipped for record in steps)),
    }
    if tokens := [record.tokens for record in steps if record.tokens is not None]:
        metrics["tokens_seen"] = float(sum(tokens))
    if metrics["mean_loss"]:
        metrics["loss_cv"] = metrics["loss_std"] / metrics["mean_loss"]
    if padding_percent(steps):
        metrics["tokens_processed"] = float(sum(record.positions for record in steps))
    if norms:
        metrics["mean_grad_norm"] = statistics.fmean(norms)
        metrics["std_grad_norm"] = statistics.pstdev(norms)
    return metrics


def _both(name: str, metrics: Mapping[str, float], others: Mapping[str, float]) -> tuple[float, float] | None:
    return (metrics[name], others[name]) if name in metrics and name in others else None
