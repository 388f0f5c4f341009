"""No optimizer step waits for the GPU, whatever the technique: the host would stop queueing kernels."""

import math
from typing import Any

import pytest
import torch
from conftest import no_synchronization, tiny, with_corpus_of
from test_training_step import VARIANTS

from pipeline.base.results import StepRecord
from pipeline.training.loop import Loop
from pipeline.training.step import build_step

ALONE: list[dict[str, Any]] = [{}, {"precision": "tf32"}, *(values for v in VARIANTS.values() for values, _ in v)]
"""Plain training, and every technique with each of its values."""
TOGETHER = [
    {"precision": precision, "checkpointing": "every_layer", "micro_batch_size": 2, "accumulation_steps": 2}
    for precision in ("fp32", "tf32", "fp16", "bf16")
]
"""All techniques at once, in every precision."""


@pytest.mark.gpu
def test_a_wait_for_the_gpu_is_an_error_here() -> None:
    value = torch.ones((), device="cuda")
    with no_synchronization(), pytest.raises(RuntimeError, match="synchronizing"):
        value.item()
    value.item()


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [*ALONE, *TOGETHER], ids=lambda values: "-".join(map(str, values.values())))
def test_no_step_waits_for_the_gpu(settings: dict[str, Any]) -> None:
    """On a model of our own: transformers' mask code asks one question of the device in each forward pass."""
    experiment = tiny(**with_corpus_of("encoder_stack"), device="cuda", num_steps=8, **settings)
    prepared = experiment.prepare()
    step = build_step(experiment, prepared)
    records: list[StepRecord] = []
    with step.run_context():
        loop = Loop(experiment, prepared.train, step, step.make_optimizer(step.trainable.module), records.append)
        loop.advance(2)
        with no_synchronization():
            loop.advance(6)
    assert len(records) == 8 and all(math.isfinite(record.loss) for record in records)
