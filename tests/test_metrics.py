"""Summary metrics of runs, and their comparison with a baseline."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.base.results import Finished, MemoryUse, Outcome, PhaseMemory, Result, StepRecord
from pipeline.base.units import MIB
from pipeline.training.metrics import Row, against_baseline, moving_average, step_metrics, summarize
from pipeline.training.time_differences import with_times


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "loss": 8.0 - step,
        "grad_norm": 1.0 + step,
        "seconds": 10.0 if step < 2 else 0.5,
        "tokens": 100,
        "positions": 100,
        "learning_rate": 1e-3,
        "loss_scale": None,
        "skipped": False,
    }
    return StepRecord(**values | changes)


def result(num_steps: int = 6, **changes: Any) -> Result:
    memory = MemoryUse(
        peak_allocated_bytes=10 * MIB,
        peak_process_bytes=500 * MIB,
        phases=(
            PhaseMemory(step=0, phase="load", allocated_bytes=MIB),
            PhaseMemory(step=1, phase="forward", allocated_bytes=9 * MIB),
        ),
    )
    finished = Finished(eval_loss=7.5, block_forwards_per_step=4)
    values: dict[str, Any] = {
        "outcome": Outcome.OK,
        "detail": None,
        "steps": tuple(record(i) for i in range(num_steps)),
        "memory": memory,
        "finished": finished,
        "seconds_total": 25.0,
    }
    return Result(**values | changes)


def test_summary_metrics_of_a_cpu_run() -> None:
    assert summarize(result(), 4, 2) == pytest.approx(
        {
            "seconds_total": 25.0,
            "effective_batch_size": 4.0,
            "peak_allocated_mib": 10.0,
            "peak_process_mib": 500.0,
            "allocated_after_load_mib": 1.0,
            "allocated_after_forward_2_mib": 9.0,
            "tokens_seen": 600.0,
            "final_loss": 3.0,
            "mean_loss": 5.5,
            "loss_std": math.sqrt(35 / 12),
            "loss_cv": math.sqrt(35 / 12) / 5.5,
            "skipped_steps": 0.0,
            "mean_grad_norm": 3.5,
            "std_grad_norm": math.sqrt(35 / 12),
            "seconds_per_step": 0.5,
            "seconds_per_step_iqr": 0.0,
            "samples_per_second": 8.0,
            "tokens_per_second": 200.0,
            "block_forwards_per_step": 4.0,
            "eval_loss": 7.5,
        }
    )


def test_metrics_without_a_value_are_left_out() -> None:
    metrics = summarize(result(outcome=Outcome.OUT_OF_MEMORY, steps=(), memory=None, finished=None), 4, 2)
    assert set(metrics) == {"seconds_total", "effective_batch_size"}


def test_warm_up_steps_are_not_timed() -> None:
    assert not {"seconds_per_step", "tokens_per_second"} & set(summarize(result(2), 4, 2))


def test_non_finite_gradient_norms_are_left_out_of_the_mean() -> None:
    steps = (
        record(0, grad_norm=math.inf, skipped=True, loss_scale=4.0),
        record(1),
        record(2, grad_norm=math.nan, skipped=True),
    )
    metrics = summarize(result(steps=steps), 4, 2)
    assert metrics["mean_grad_norm"] == 2.0
    assert metrics["skipped_steps"] == 2.0
    assert "grad_norm" not in step_metrics(steps[0])
    assert step_metrics(steps[0])["loss_scale"] == 4.0


def test_memory_and_loss_are_compared_with_the_baseline() -> None:
    base = result()
    half = result(
        steps=tuple(record(i, loss=8.25 - i, seconds=1.0) for i in range(6)),
        memory=MemoryUse(
            peak_allocated_bytes=4 * MIB,
            peak_process_bytes=1,
        ),
    )
    base_metrics, metrics = summarize(base, 4, 2), summarize(half, 4, 2)
    compared = against_baseline(half, metrics, base, base_metrics)
    assert compared == pytest.approx({"memory_saving_percent": 60.0, "max_loss_difference": 0.25})


def test_losses_of_other_steps_or_that_are_no_number_are_not_said_to_agree() -> None:
    base = result()
    metrics = summarize(base, 4, 2)
    later = result(steps=tuple(replace(step, step=step.step + 6) for step in base.steps))
    assert "max_loss_difference" not in against_baseline(later, metrics, base, metrics)
    broken = result(steps=(base.steps[0], *(replace(step, loss=math.nan) for step in base.steps[1:])))
    assert math.isnan(against_baseline(broken, metrics, base, metrics)["max_loss_difference"])


def test_runs_of_different_effective_batches_compare_in_time_but_not_in_loss() -> None:
    base, larger = result(), result()
    compared = against_baseline(larger, summarize(larger, 8, 2), base, summarize(base, 4, 2))
    assert "max_loss_difference" not in compared
    kept = {"comparison": "it", "params": {}, "skipped": None}
    plain = Row(name="plain", is_baseline=True, result=base, metrics=summarize(base, 4, 2), **kept)
    other = Row(name="larger", is_baseline=False, result=larger, metrics=summarize(larger, 8, 2), **kept)
    assert with_times([plain, other])[1].metrics["speedup"] == pytest.approx(2.0)


def test_a_baseline_without_metrics_gives_no_comparison() -> None:
    failed = result(outcome=Outcome.CRASHED, steps=(), memory=None, finished=None)
    assert against_baseline(result(), summarize(result(), 4, 2), failed, summarize(failed, 4, 2)) == {}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(1, 12))
def test_a_moving_average_is_within_the_range_of_its_window(values: list[float], window: int) -> None:
    smooth = moving_average(values, window)
    assert len(smooth) == len(values)
    for end, value in enumerate(smooth, 1):
        seen = values[max(0, end - window) : end]
        assert min(seen) - 1e-6 <= value <= max(seen) + 1e-6


def test_a_run_that_did_not_complete_is_not_compared() -> None:
    failed, completed = result(outcome=Outcome.OUT_OF_MEMORY), result()
    assert against_baseline(failed, summarize(failed, 4, 2), completed, summarize(completed, 4, 2)) == {}
    assert against_baseline(completed, summarize(completed, 4, 2), failed, summarize(failed, 4, 2)) == {}


def test_a_mean_loss_of_zero_has_no_coefficient_of_variation() -> None:
    metrics = summarize(result(steps=(record(0, loss=0.0), record(1, loss=0.0))), 4, 1)
    assert metrics["mean_loss"] == 0.0
    assert "loss_cv" not in metrics
