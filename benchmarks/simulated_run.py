"""One simulated card: predicts configurations, and runs them on it; started by simulated_card.py.

    python benchmarks/simulated_run.py < tasks

Reads a JSON object from each line of its input, and answers each with one on its output.
"""

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from simulated_training import train_any_weights

from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.given import merged, nested
from pipeline.memory.device import hardware_of
from pipeline.prediction.predict import predict
from pipeline.runtime.run import execute

SHORT = {"device": "cuda:0", "num_steps": 3, "timing_warmup_steps": 2, "eval_steps": 0}


def predicted(experiment: Experiment) -> dict[str, Any]:
    """Return the predicted peaks, by the columns of a row."""
    peaks = predict(experiment, hardware_of(experiment.device))
    return {
        "predicted_allocated_bytes": peaks.peak_allocated_bytes,
        "predicted_reserved_bytes": peaks.peak_reserved_bytes,
    }


def measured(experiment: Experiment) -> dict[str, Any]:
    """Return the outcome of a run in a process of its own and its peaks, likewise."""
    with tempfile.TemporaryDirectory() as logs:
        result = execute(experiment, Path(logs) / "log", work=train_any_weights)
    if result.memory is None:
        raise RuntimeError(f"{result.outcome}: {result.detail}")
    return {
        "outcome": str(result.outcome),
        "measured_allocated_bytes": result.memory.peak_allocated_bytes,
        "measured_reserved_bytes": result.memory.peak_reserved_bytes,
    }


def answer(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what is predicted, or measured, of a short run with these settings."""
    experiment = make_experiment(merged(nested(SHORT), nested(settings)), "main")
    return {"predict": predicted, "measure": measured}[kind](experiment)


def main() -> None:
    """Answer every task."""
    for line in sys.stdin:
        try:
            reply = answer(**json.loads(line))
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
