"""Copies of the project whose commands run on simulated cards, and what each run on a card must have in MLflow."""

import os
import sys
from pathlib import Path

from cards import environment_of
from finished import shorten_checkpointing, shorten_finetune, shorten_levers
from mlflow.entities import Run
from project import SMALL, Project

NANO = {**SMALL, "device": "auto", "model": "gpt2-nano"}
"""Settings that make any entry point short, on the first card."""
MEMORY = ("memory/peak_allocated_mib", "memory/peak_reserved_mib", "memory/peak_device_mib")
PREDICTED = (
    "memory/predicted_peak_allocated_mib",
    "memory/predicted_peak_reserved_mib",
    "check/prediction_error_percent",
)


def project_on(card: str, folder: Path, num_devices: int = 1) -> Project:
    """Return a copy of the project whose commands run on a card."""
    project = Project.copy(folder)
    shorten_levers(project)
    shorten_checkpointing(project)
    shorten_finetune(project)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    project.environment.update(environment_of(card, num_devices, {**os.environ, "PATH": path}))
    return project


def assert_is_measured(run: Run, card: str, name: str, device: str = "cuda:0") -> None:
    """Check the outcome of a run on a card, its peaks of memory and the error of their prediction."""
    tags, metrics = run.data.tags, run.data.metrics
    assert (tags["outcome"], tags["device"], tags["device_name"]) == ("ok", device, card), name
    assert {*MEMORY, *PREDICTED} <= set(metrics), (name, tags.get("prediction"))
    allocated, reserved, on_device = (metrics[kind] for kind in MEMORY)
    assert 0 < allocated <= reserved <= on_device and metrics["memory/allocation_retries"] == 0, name
    assert abs(metrics["check/prediction_error_percent"]) < 0.2, name
    assert abs(metrics["memory/predicted_peak_reserved_mib"] - reserved) <= 2, name  # a small segment of the allocator
