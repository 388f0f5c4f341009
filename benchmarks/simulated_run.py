"""One simulated card: predicts configurations, and runs them on it; started by benchmarks/cuda_without_gpu.py.

    python benchmarks/simulated_run.py FOLDER < tasks

Reads a JSON object from each line of its input, and answers each with one on its output. FOLDER holds the models'
configurations.
"""

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from simulated_difference import difference
from simulated_training import train_any_weights

from pipeline.base.results import Outcome, Result
from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.settings import merged, nested
from pipeline.memory.device import hardware_of
from pipeline.prediction.predict import predict
from pipeline.runtime.environment import environment
from pipeline.runtime.run import execute

SHORT = {"device": "cuda:0", "num_steps": 3, "timing_warmup_steps": 2, "eval_steps": 0}
UNIT_BYTES = 2 * MIB
"""All reserved bytes are multiples of it, so a budget between two multiples equals the lower one."""


def experiment_of(settings: dict[str, Any], folder: Path, **changes: Any) -> Experiment:
    """Return the experiment, with a local folder in place of the name of a configuration in `folder`."""
    local = folder / settings["model"]
    model = {"model": str(local)} if local.is_dir() else {}
    return make_experiment(merged(nested({**SHORT, **changes}), nested({**settings, **model})), "main")


def predicted(experiment: Experiment) -> dict[str, Any]:
    """Return the predicted peaks, by the columns of a row."""
    peaks = predict(experiment, hardware_of(experiment.device))
    return {
        "predicted_allocated_bytes": peaks.peak_allocated_bytes,
        "predicted_reserved_bytes": peaks.peak_reserved_bytes,
    }


def measured(experiment: Experiment) -> dict[str, Any]:
    """Return the outcome of a real run and its peaks, likewise."""
    result = run(experiment)
    if result.memory is None:
        raise RuntimeError(f"{result.outcome}: {result.detail}")
    return {
        "outcome": str(result.outcome),
        "measured_allocated_bytes": result.memory.peak_allocated_bytes,
        "measured_reserved_bytes": result.memory.peak_reserved_bytes,
    }


def run(experiment: Experiment) -> Result:
    """Train for three optimizer steps in a process of its own."""
    with tempfile.TemporaryDirectory() as logs:
        return execute(experiment, Path(logs) / "log", work=train_any_weights)


def smallest_budget(experiment: Experiment) -> int:
    """Return the smallest multiple of UNIT_BYTES that `Prediction.fits` accepts."""
    prediction = predict(experiment, hardware_of(experiment.device))
    low, high = prediction.peak_allocated_bytes // UNIT_BYTES - 1, prediction.peak_bytes // UNIT_BYTES + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if prediction.fits(middle * UNIT_BYTES) else (middle, high)
    return high * UNIT_BYTES


def fits(settings: dict[str, Any], folder: Path, budget_bytes: int) -> bool:
    """Whether a real run under this cap stays within it.

    Raises:
        RuntimeError: it ended neither within its budget nor for lack of memory.

    """
    result = run(experiment_of(settings, folder, budget=f"{budget_bytes // MIB}MiB"))
    if result.outcome not in (Outcome.OK, Outcome.OVER_BUDGET, Outcome.OUT_OF_MEMORY):
        raise RuntimeError(f"under a budget of {budget_bytes} bytes: {result.outcome}, {result.detail}")
    return result.outcome is Outcome.OK


def real_smallest_budget(settings: dict[str, Any], folder: Path, start_bytes: int) -> int:
    """Return the smallest budget within which a real run stays: a bracket around `start_bytes`, then bisection."""
    step, known = 1, start_bytes // UNIT_BYTES
    does_fit = fits(settings, folder, known * UNIT_BYTES)
    while True:
        other = known + (-step if does_fit else step)
        if fits(settings, folder, other * UNIT_BYTES) != does_fit:
            break
        known, step = other, 3 * step
    low, high = (other, known) if does_fit else (known, other)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(settings, folder, middle * UNIT_BYTES) else (middle, high)
    return high * UNIT_BYTES


def answer(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what a task asks for."""
    kind, settings = task["kind"], task.get("settings", {})
    if kind == "about":
        return {**environment(torch.device("cuda", 0))}
    if kind == "measure_budget":
        return {"bytes": real_smallest_budget(settings, folder, task["start_bytes"])}
    experiment = experiment_of(settings, folder)
    if kind == "predict_budget":
        return {"bytes": smallest_budget(experiment)}
    if kind == "explain":
        return {"lines": list(difference(experiment))}
    return predicted(experiment) if kind == "predict" else measured(experiment)


def main() -> None:
    """Answer every task."""
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line), folder)
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
