"""The claim about all techniques together."""

from collections.abc import Iterator

from folklore.claim import Check, Claim, between
from folklore.metrics import memory_saved_percent, slower_percent
from folklore.scale import Scale

MICRO_BATCH = 2


def _checks(scale: Scale) -> Iterator[Check]:
    for name in ("small", "medium"):
        for size in scale.effective_batches:
            common = scale.model(name, sequence_length=scale.short_length, effective_batch_size=size)
            plain = {**common, "micro_batch_size": size, "precision": "fp32"}
            all_three = {
                **common,
                "micro_batch_size": MICRO_BATCH,
                "precision": "bf16",
                "checkpointing": "every_layer",
            }
            condition = f"GPT-2 {name}, bf16, {MICRO_BATCH}x{size // MICRO_BATCH}, every layer against fp32, {size}x1"
            runs = (all_three, plain)
            for what, claimed, figure in (
                ("memory saved", between(65, 80), memory_saved_percent),
                ("time per sample added", between(10, 20), slower_percent),
            ):
                yield Check(what=what, condition=condition, unit="%", claimed=claimed, runs=runs, figure=figure)


CLAIMS = (
    Claim(
        name="together",
        text="Mixed precision, accumulation and checkpointing together save 65 to 80 % of the memory and are 10 to "
        "20 % slower",
        checks=_checks,
    ),
)
