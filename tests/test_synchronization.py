"""No optimizer step waits for the GPU, whatever the technique: the host would stop queueing kernels."""

import math
from typing import Any

import pytest
import torch
from conftest import no_synchronization, tiny, with_corpus_of
from levers import ON_CUDA, Lever, each, needs_package
from trainings import loop_of
from transformers import masking_utils

TOGETHER = [
    {"precision": precision, "checkpointing": "every_layer", "micro_batch_size": 2, "accumulation_steps": 2}
    for precision in ("fp32", "tf32", "fp16", "bf16")
]
"""Techniques together, in every precision."""


@pytest.mark.gpu
def test_a_wait_for_the_gpu_is_an_error_here() -> None:
    value = torch.ones((), device="cuda")
    with no_synchronization(), pytest.raises(RuntimeError, match="synchronizing"):
        value.item()
    value.item()


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, *TOGETHER], ids=lambda values: "-".join(map(str, values.values())))
def test_no_step_waits_for_the_gpu(settings: dict[str, Any]) -> None:
    run_without_waiting({**with_corpus_of("encoder_stack"), **settings})


@pytest.mark.matrix(6)
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:inner dimension")  # bitsandbytes' fast kernel takes wider layers than these
@each(lever for lever in ON_CUDA if lever.predicted and not lever.waits)
def test_no_step_with_a_lever_waits_for_the_gpu(lever: Lever, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_package(lever)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    run_without_waiting({**with_corpus_of(lever.models[-1]), **lever.plain, **lever.settings})


def run_without_waiting(settings: dict[str, Any]) -> None:
    """Train, and raise an error if a step waits for the GPU.

    On a model of our own, or without the one question that transformers' mask code asks the device in a forward pass.
    """
    records: list[Any] = []
    step, loop = loop_of(tiny(device="cuda", num_steps=8, **settings), records.append)
    with step.run_context():
        loop.advance(2)
        with no_synchronization():
            loop.advance(6)
    assert len(records) == 8 and all(math.isfinite(record.loss) for record in records)
