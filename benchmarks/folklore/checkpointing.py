"""Claims about activation checkpointing, of every layer."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from folklore.claim import Check, Claim, Claimed, about
from folklore.metrics import Figure, activations_saved_percent, memory_saved_percent, slower_percent
from folklore.scale import Scale

SAVED_BY_SIZE = {"small": 30.0, "medium": 40.0}
SAVED, SLOWER = "memory saved", "time per sample added"


def _check(what: str, condition: str, claimed: Claimed, settings: Mapping[str, Any], figure: Figure) -> Check:
    runs = ({**settings, "checkpointing": "every_layer"}, {**settings, "checkpointing": "none"})
    return Check(what=what, condition=condition, unit="%", claimed=claimed, runs=runs, figure=figure)


def _conditions(scale: Scale, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield words and settings: both lengths, from a micro-batch of 2 on."""
    for length in (scale.short_length, scale.long_length):
        for size in (2, *scale.larger_micro_batches):
            settings = scale.model(name, sequence_length=length, micro_batch_size=size)
            yield f"GPT-2 {name}, micro-batch {size}, {length} tokens", settings


def _medium(scale: Scale) -> Iterator[Check]:
    for condition, settings in _conditions(scale, "medium"):
        yield _check(SAVED, condition, about(42, 5), settings, memory_saved_percent)
        yield _check(SLOWER, condition, about(25, 5), settings, slower_percent)


def _sizes(scale: Scale) -> Iterator[Check]:
    for name, percent in SAVED_BY_SIZE.items():
        for condition, settings in _conditions(scale, name):
            yield _check(f"{SAVED}, {name}", condition, about(percent, 5), settings, memory_saved_percent)


def _depth(scale: Scale) -> Iterator[Check]:
    for layers in scale.depths:
        shape = {"causal_lm.num_layers": layers, "sequence_length": scale.long_length, "micro_batch_size": 2}
        settings = {**scale.model("depth"), **shape}
        claimed = about(round(100 * (1 - 1 / math.sqrt(layers))), 5)
        yield _check("activations saved", f"{layers} layers", claimed, settings, activations_saved_percent)
        yield _check("peak memory saved", f"{layers} layers", claimed, settings, memory_saved_percent)


def _encoder(scale: Scale) -> Iterator[Check]:
    settings = scale.model("stack", micro_batch_size=4)
    condition = f"6 layers x {settings['encoder_stack.width']}, micro-batch 4, {settings['sequence_length']} tokens"
    yield _check(SAVED, condition, about(5.7, 2), settings, memory_saved_percent)
    yield _check(SLOWER, condition, about(10.8, 5), settings, slower_percent)


CLAIMS = (
    Claim(
        name="checkpointing",
        text="Checkpointing GPT-2 medium saves 42 % of the memory for 25 % more time",
        checks=_medium,
    ),
    Claim(
        name="checkpointing_sizes",
        text="Checkpointing saves 30 % of the memory of GPT-2 small and 40 % of GPT-2 medium's",
        checks=_sizes,
    ),
    Claim(
        name="depth",
        text="Checkpointing L layers saves 1 - 1/sqrt(L) of the memory",
        checks=_depth,
    ),
    Claim(
        name="encoder",
        text="Checkpointing a stack of 6 x 768 encoder layers (batch 4, 256 tokens) saves 5.7 % for 10.8 % more time, "
        "as one published run on an RTX 2000 Ada has it",
        checks=_encoder,
    ),
)
