"""The events of a run, as observers receive them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.base.results import Finished, MemoryUse, Result, StepRecord
from pipeline.config.command import Runnable
from pipeline.runtime.failures import Failed
from pipeline.training.metrics import Summary


@dataclass(frozen=True, kw_only=True)
class Run:
    """One Experiment or Command to run under a name, and the folder that its results go to."""

    name: str
    runnable: Runnable
    folder: Path
    labels: Mapping[str, str] = field(default_factory=dict)
    """What distinguishes this run from the other runs of its job."""


class Observer:
    """Receives the events of runs, one run at a time; by default it ignores them."""

    def started(self, run: Run) -> None:
        """Receive the run that starts now; its folder exists and holds config.yaml."""

    def receive(self, event: Any) -> None:
        """Pass an event of the run's process on to step(), memory() or message()."""
        if isinstance(event, StepRecord):
            self.step(event)
        elif isinstance(event, MemoryUse):
            self.memory(event)
        elif not isinstance(event, Finished | Failed):
            self.message(event)

    def step(self, record: StepRecord) -> None:
        """Receive one optimizer step; steps.jsonl in the run's folder holds it already."""

    def memory(self, memory: MemoryUse) -> None:
        """Receive the memory used so far."""

    def message(self, message: Any) -> None:
        """Receive an event of other work than training."""

    def amended(self, metrics: Mapping[str, float]) -> None:
        """Receive summary metrics of a finished run that further runs have changed."""

    def finished(self, result: Result, summary: Summary) -> None:
        """Receive the outcome; result.json in the run's folder holds it already, unless the run was aborted."""
