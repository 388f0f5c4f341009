"""The names of metrics in MLflow: a section and a name, so that its charts are grouped and its columns shared.

In files and in code a metric has the name that it has here on the left. What has one value for each run is logged at
step 0, where MLflow draws a bar for each run.
"""

from collections.abc import Iterator, Mapping

from pipeline.memory.meter import PHASES, WATCHED_STEPS

SUMMARIES: Mapping[str, str] = {
    "peak_allocated_mib": "memory/peak_allocated_mib",
    "peak_reserved_mib": "memory/peak_reserved_mib",
    "peak_device_mib": "memory/peak_device_mib",
    "peak_process_mib": "memory/peak_process_mib",
    "peak_evaluation_mib": "memory/peak_evaluation_mib",
    "peak_cpu_allocated_mib": "memory/peak_cpu_allocated_mib",
    "predicted_peak_allocated_mib": "memory/predicted_peak_allocated_mib",
    "predicted_peak_reserved_mib": "memory/predicted_peak_reserved_mib",
    "predicted_peak_mib": "memory/predicted_peak_mib",
    "smallest_memory_mib": "memory/smallest_memory_mib",
    "allocation_retries": "memory/allocation_retries",
    "memory_saving_percent": "memory/saving_percent",
    "largest_memory_saving_percent": "memory/largest_saving_percent",
    "tokens_per_second": "speed/tokens_per_second",
    "samples_per_second": "speed/samples_per_second",
    "predicted_tokens_per_second": "speed/predicted_tokens_per_second",
    "seconds_per_step": "speed/seconds_per_step",
    "seconds_per_step_iqr": "speed/seconds_per_step_iqr",
    "seconds_per_step_error_percent": "speed/seconds_per_step_error_percent",
    "seconds_per_step_margin_percent": "speed/seconds_per_step_margin_percent",
    "predicted_seconds_per_step": "speed/predicted_seconds_per_step",
    "seconds_total": "speed/seconds_total",
    "speedup": "speed/speedup",
    "largest_speedup": "speed/largest_speedup",
    "time_overhead_percent": "speed/time_overhead_percent",
    "time_overhead_low_percent": "speed/time_overhead_low_percent",
    "time_overhead_high_percent": "speed/time_overhead_high_percent",
    "passes_per_micro_batch": "speed/passes_per_micro_batch",
    "block_forwards_per_step": "speed/block_forwards_per_step",
    "final_loss": "loss/final",
    "mean_loss": "loss/mean",
    "eval_loss": "loss/held_out",
    "loss_std": "loss/std",
    "loss_cv": "loss/cv",
    "common_steps_loss": "loss/common_steps",
    "mean_grad_norm": "gradient/mean_norm",
    "std_grad_norm": "gradient/std_norm",
    "gradient_underflow_percent": "gradient/underflow_percent",
    "skipped_steps": "gradient/skipped_steps",
    "effective_batch_size": "data/effective_batch_size",
    "tokens_seen": "data/tokens_seen",
    "tokens_processed": "data/tokens_processed",
    "padding_percent": "data/padding_percent",
    "longest_sequence_length": "data/longest_sequence_length",
    "prediction_error_percent": "check/prediction_error_percent",
    "max_loss_difference": "check/max_loss_difference",
    "bound_percent": "check/bound_percent",
    "num_configurations_that_fit": "check/num_configurations_that_fit",
}
"""Metrics of which a run has one value: their names in files, and in MLflow."""
STEP, SYSTEM = "step/", "system/"
"""What the names of series begin with: those of the optimizer steps, and those that MLflow itself measures."""
PHASES_MIB = "memory/over_the_step_mib"
"""The series of what is allocated after each phase: 0 is loading, 1 the forward passes of the first optimizer step."""
_IN_FILES = {name: own for own, name in SUMMARIES.items()}


def summary_points(metrics: Mapping[str, float]) -> Iterator[tuple[str, float, int]]:
    """Yield summary metrics as MLflow has them: name, value and step."""
    phases = _phases()
    for name, value in metrics.items():
        if name in phases:
            yield PHASES_MIB, value, phases[name]
        else:
            yield SUMMARIES.get(name, name), value, 0


def summaries_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the summary metrics of a run in MLflow by their names in files."""
    return {
        _IN_FILES.get(name, name): value
        for name, value in metrics.items()
        if not name.startswith((STEP, SYSTEM)) and name != PHASES_MIB
    }


def phases_of(points: Mapping[int, float]) -> dict[str, float]:
    """Return the summary metrics of which PHASES_MIB has these values, by step."""
    return {name: points[number] for name, number in _phases().items() if number in points}


def _phases() -> dict[str, int]:
    """Return the number of each summary metric of a phase, such as `allocated_after_backward_1_mib`."""
    load, *others = PHASES
    names = [load, *(f"{phase}_{step + 1}" for step in range(WATCHED_STEPS) for phase in others)]
    return {f"allocated_after_{name}_mib": number for number, name in enumerate(names)}
