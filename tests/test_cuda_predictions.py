"""Predicted peaks are those of torch's own CUDA allocator, on simulated cards: a small form of its benchmark."""

from contextlib import nullcontext
from typing import Any

import pytest
from conftest import IS_SIMULATED
from simulated_card import QUANTITIES, simulated_card

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_SIMULATED, reason="the processes that it starts need the simulated cards' environment"),
]

EXPANDABLE = {"h200": False, "a100": True, "rtx4090": False, "t4": True}
"""Whether the allocator of each card has expandable segments."""
LARGEST_ERRORS = {"allocated": 0.00005, "reserved": 0.0005}
PACKED = {
    "corpus": "chat",
    "sequences": "packed_documents",
    "sequence_length": 256,
    "causal_lm.num_layers": 3,
    "causal_lm.width": 512,
    "causal_lm.num_heads": 8,
    "micro_batch_size": 4,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "heads of 64, dropout, accumulation": {
        "model": "gpt2-nano",
        "precision": "fp16",
        "causal_lm.num_layers": 2,
        "causal_lm.width": 512,
        "causal_lm.num_heads": 8,
        "causal_lm.dropout": 0.1,
        "micro_batch_size": 8,
        "accumulation_steps": 2,
    },
    "heads of 128 that share keys, checkpointed, padded": {
        "model": "llama-nano",
        "precision": "fp32",
        "causal_lm.num_layers": 2,
        "causal_lm.width": 1024,
        "causal_lm.num_heads": 8,
        "vocabulary_size": 8192,
        "checkpointing": "every_layer",
        "sequences": "padded",
        "micro_batch_size": 4,
    },
    "an encoder, every second layer checkpointed": {
        "model": "encoder_stack",
        "corpus": "random_vectors",
        "precision": "fp16",
        "encoder_stack.num_layers": 2,
        "encoder_stack.width": 768,
        "encoder_stack.dropout": 0.1,
        "random_vectors.num_sequences": 16,
        "checkpointing": "every_2_layers",
        "micro_batch_size": 8,
    },
    "packed documents, in bf16 where the card has it": {**PACKED, "model": "gpt2-nano", "precision": "bf16"},
    "packed documents, shared keys, checkpointed, chunked": {
        **PACKED,
        "model": "llama-nano",
        "precision": "fp16",
        "checkpointing": "every_layer",
        "loss_kernel": "chunked",
    },
    "packed documents, eager": {**PACKED, "model": "llama-nano", "precision": "fp32", "attention": "eager"},
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", EXPANDABLE)
def test_predicted_peaks_are_those_of_the_real_allocator(name: str, card: Any) -> None:
    peaks: dict[tuple[str, str], list[int]] = {}
    own = nullcontext(card) if name == "h200" else simulated_card(name, expandable_segments=EXPANDABLE[name])
    with own as asked:
        for configuration, settings in CONFIGURATIONS.items():
            if name == "t4" and settings["precision"] == "bf16":
                settings = {**settings, "precision": "fp16"}
            predicted, measured = (asked.ask(kind=kind, settings=settings) for kind in ("predict", "measure"))
            assert measured["outcome"] == "ok"
            for quantity in QUANTITIES:
                sides = [predicted[f"predicted_{quantity}_bytes"], measured[f"measured_{quantity}_bytes"]]
                peaks[configuration, quantity] = sides
    for (configuration, quantity), (guess, truth) in peaks.items():
        assert guess == pytest.approx(truth, rel=LARGEST_ERRORS[quantity]), f"{quantity} bytes of {configuration}"
