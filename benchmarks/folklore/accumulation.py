"""Claims about accumulating gradients, and about what memory is made of."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from folklore.claim import Check, Claim, about, at_least, at_most, between
from folklore.metrics import (
    activations_mib,
    alone,
    fit_error_percent,
    gradients_mib,
    largest_loss_difference_percent,
    memory_added_percent,
    memory_saved_percent,
    optimizer_state_mib,
    parameters_mib,
    peak_rise_in_gradients_percent,
    slower_percent,
    smoother_percent,
)
from folklore.scale import Scale

PASSES = (4, 8, 16)
CUTS = ((32, 1), (16, 2), (8, 4), (4, 8))
"""Micro-batches and forward passes of one effective batch."""
ACTIVATIONS_GB = {4: 2.0, 8: 4.0, 16: 8.0}
"""By micro-batch."""
PARTS_GB: dict[str, tuple[float, Callable[..., float]]] = {
    "parameters": (0.5, parameters_mib),
    "gradients": (0.5, gradients_mib),
    "optimizer state": (1.0, optimizer_state_mib),
}


def _cut(scale: Scale, size: int, passes: int) -> dict[str, Any]:
    """Return the settings of a cut; dropout would draw other masks for each, and their losses could not be compared."""
    model = scale.model("small", sequence_length=scale.short_length, micro_batch_size=size, accumulation_steps=passes)
    return {**model, "causal_lm.dropout": 0.0}


def _growing(scale: Scale) -> Iterator[Check]:
    base = _cut(scale, 2, 1)
    for passes in PASSES:
        runs = (_cut(scale, 2, passes), base)
        condition = f"2x{passes} against 2x1"
        for what, claimed, figure in (
            ("peak memory added", about(0, 1), memory_added_percent),
            ("time per sample added", between(5, 10), slower_percent),
            ("the loss jumps less from step to step", at_least(5), smoother_percent),
        ):
            yield Check(what=what, condition=condition, unit="%", claimed=claimed, runs=runs, figure=figure)
    yield Check(
        what="peak memory added by a second pass, of one copy of the gradients",
        condition="2x2 against 2x1",
        unit="%",
        claimed=between(0, 100),
        runs=(_cut(scale, 2, 2), base),
        figure=peak_rise_in_gradients_percent,
    )
    for passes in PASSES:
        yield Check(
            what="peak memory added by more than two passes",
            condition=f"2x{passes} against 2x2",
            unit="%",
            claimed=about(0, 1),
            runs=(_cut(scale, 2, passes), _cut(scale, 2, 2)),
            figure=memory_added_percent,
        )


def _one_batch(scale: Scale) -> Iterator[Check]:
    whole = _cut(scale, *CUTS[0])
    for size, passes in CUTS[1:]:
        runs, condition = (_cut(scale, size, passes), whole), f"{size}x{passes} against 32x1"
        for what, claimed, figure in (
            ("difference of a step's loss", at_most(0.1), largest_loss_difference_percent),
            ("time per sample added", about(0, 10), slower_percent),
        ):
            yield Check(what=what, condition=condition, unit="%", claimed=claimed, runs=runs, figure=figure)
    for (larger, fewer), (size, passes) in pairwise(CUTS):
        yield Check(
            what="memory saved by half the micro-batch",
            condition=f"{size}x{passes} against {larger}x{fewer}",
            unit="%",
            claimed=at_least(1),
            runs=(_cut(scale, size, passes), _cut(scale, larger, fewer)),
            figure=memory_saved_percent,
        )
    yield Check(
        what="error of time = forward passes x a + updates x b",
        condition="fitted to 32x1, 16x2, 8x4 and 4x8",
        unit="%",
        claimed=at_most(5),
        runs=tuple(_cut(scale, *cut) for cut in CUTS),
        figure=fit_error_percent,
    )


def _parts(scale: Scale) -> Iterator[Check]:
    runs = {
        size: (scale.model("small", sequence_length=scale.long_length, micro_batch_size=size),)
        for size in ACTIVATIONS_GB
    }
    for size, gigabytes in ACTIVATIONS_GB.items():
        yield Check(
            what="activations",
            condition=f"GPT-2 small, fp32, micro-batch {size}, {scale.long_length} tokens",
            unit=scale.gigabyte,
            claimed=about(gigabytes, gigabytes / 4),
            runs=runs[size],
            figure=alone(activations_mib, scale.gigabyte_mib),
        )
    for what, (gigabytes, figure) in PARTS_GB.items():
        yield Check(
            what=what,
            condition="GPT-2 small, fp32, AdamW",
            unit=scale.gigabyte,
            claimed=about(gigabytes, gigabytes / 10),
            runs=runs[min(runs)],
            figure=alone(figure, scale.gigabyte_mib),
        )


CLAIMS = (
    Claim(
        name="accumulation",
        text="Accumulating over more passes leaves the peak memory unchanged, costs 5 to 10 % more time a sample, and "
        "smooths the loss",
        checks=_growing,
    ),
    Claim(
        name="one_batch",
        text="One effective batch of 32, cut smaller, trains with the same losses in less memory and nearly the same "
        "time",
        checks=_one_batch,
    ),
    Claim(
        name="parts",
        text="GPT-2 small needs 2, 4, 8 GB of activations at micro-batch 4, 8, 16, and 0.5 GB of parameters, 0.5 of "
        "gradients, 1 of optimizer state",
        checks=_parts,
    ),
)
