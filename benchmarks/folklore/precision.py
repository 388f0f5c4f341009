"""Claims about number formats."""

from collections.abc import Iterator

from folklore.claim import Check, Claim, about, at_most
from folklore.metrics import final_loss_difference_percent, memory_saved_percent, speedup
from folklore.scale import Scale

MICRO_BATCHES = (2, 8, 32)
"""The answer depends on them."""
SPEEDUPS = {"fp16": 2.2, "bf16": 2.1}


def _checks(scale: Scale) -> Iterator[Check]:
    for form, times in SPEEDUPS.items():
        for size in MICRO_BATCHES:
            common = scale.model(
                "small", sequence_length=scale.short_length, micro_batch_size=size, num_steps=scale.num_training_steps
            )
            runs = ({**common, "precision": form}, {**common, "precision": "fp32"})
            condition = f"GPT-2 small, micro-batch {size}, {scale.short_length} tokens"
            for what, unit, claimed, figure in (
                (f"{form}: memory saved", "%", about(50, 5), memory_saved_percent),
                (f"{form}: speed", "x", about(times, 0.2), speedup),
                (f"{form}: final loss differs", "%", at_most(1), final_loss_difference_percent),
            ):
                yield Check(what=what, condition=condition, unit=unit, claimed=claimed, runs=runs, figure=figure)


CLAIMS = (
    Claim(
        name="precision",
        text="Mixed precision halves the memory and doubles the speed (fp16 2.2 x, bf16 2.1 x of fp32), with the same "
        "final loss",
        checks=_checks,
    ),
)
