"""Looking closely: where the memory of a run is, tensor by tensor, and where its time goes, operator by operator."""

from collections.abc import Callable

import torch

from pipeline.contracts import Prepared
from pipeline.experiment import Experiment
from pipeline.memory.lifetimes import Hidden, LifetimeRecorder, Timeline, nothing_hidden
from pipeline.memory.meter import WATCHED_STEPS
from pipeline.step import Build, build_step, make_optimizer, on_device, unmarked
from pipeline.train import Loop


def record_lifetimes(
    experiment: Experiment,
    prepared: Prepared,
    mark: Callable[[int, str], None] = unmarked,
    build: Build = on_device,
    hidden: Hidden = nothing_hidden,
) -> Timeline:
    """Build the model, take two optimizer steps, and return what lived when; no tensor's value is read."""
    recorder = LifetimeRecorder(experiment.device, hidden)

    def mark_both(step: int, phase: str) -> None:
        recorder.mark(step, phase)
        mark(step, phase)

    torch.manual_seed(experiment.settings.seed)
    with recorder:
        step = build_step(experiment, prepared, build)
        mark_both(0, "load")
        optimizer = make_optimizer(step.trainable.module, experiment.settings)
        with recorder.watching(step.trainable, optimizer), step.run_context():
            loop = Loop(experiment, prepared.train, step, optimizer, lambda record: None)
            for _ in range(WATCHED_STEPS):
                loop.launch(mark_both)
    return recorder.timeline()
