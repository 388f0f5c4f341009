"""Trains in several processes on simulated cards, and prints each configuration's measured and predicted bytes as JSON.

python measure.py FOLDER '{"precision": "bf16"}' '{"optimizer": "sgd"}'
"""

import json
import sys
from pathlib import Path
from typing import Any

from pipeline.config.experiment import make_experiment
from pipeline.config.given import nested
from pipeline.memory.device import hardware_of
from pipeline.prediction.predict import predict
from pipeline.runtime.run import execute

COMMON = {"device": "cuda", "model": "gpt2-nano", "world_size": 2, "effective_batch_size": 8, "num_steps": 4}


def measured(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the peaks of one configuration."""
    experiment = make_experiment(nested(COMMON | {"micro_batch_size": 2, "eval_steps": 0} | settings), "main")
    result = execute(experiment, folder / "log.txt")
    predicted = predict(experiment, hardware_of(experiment.device))
    memory = result.memory
    return {
        "outcome": result.outcome,
        "detail": result.detail,
        "allocated": [memory and memory.peak_allocated_bytes, predicted.peak_allocated_bytes],
        "reserved": [memory and memory.peak_reserved_bytes, predicted.peak_reserved_bytes],
    }


if __name__ == "__main__":
    for words in sys.argv[2:]:
        sys.stdout.write(json.dumps(measured(json.loads(words), Path(sys.argv[1]))) + "\n")
