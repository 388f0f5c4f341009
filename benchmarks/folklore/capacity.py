"""Claims about what fits a card; where to look is predicted, and what is found there is measured.

That a micro-batch fits holds where the largest that fits is not smaller.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from folklore.claim import Check, Claim, Claimed, exactly
from folklore.metrics import completed_percent, largest_micro_batch
from folklore.scale import Scale
from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment
from pipeline.memory.device import hardware_of
from pipeline.prediction.predict import predict

EFFECTIVE_BATCH = 32
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
FORMS = {
    "fp32": {"precision": "fp32", "checkpointing": "none"},
    "bf16, every layer checkpointed": {"precision": "bf16", "checkpointing": "every_layer"},
}
CARD_GB, OTHER_PROCESS_GB = 16, 6
"""A card, and what another process holds of it."""


def fitting(scale: Scale, settings: Mapping[str, Any]) -> list[int]:
    """Return the largest micro-batch that is predicted to end within its budget, and the next one, where there are.

    What this machine cannot run at all is left to the run to say.
    """
    for number, size in enumerate(MICRO_BATCHES):
        try:
            fits = _fits(scale.experiment({**settings, **_cut(size)}, 0))
        except InvalidInputError:
            return [size]
        if not fits:
            return list(MICRO_BATCHES[max(0, number - 1) : number + 1])
    return [MICRO_BATCHES[-1]]


def _fits(experiment: Experiment) -> bool:
    """Return whether a run is predicted to end within its budget, which it must have."""
    prediction = predict(experiment.with_random_weights("cpu"), hardware_of(experiment.device))
    assert experiment.budget_bytes is not None
    return prediction.fits(experiment.budget_bytes)


def _cut(size: int) -> dict[str, Any]:
    """Return a micro-batch and its passes: two where there are more, which take the same memory."""
    return {"micro_batch_size": size, "accumulation_steps": min(2, EFFECTIVE_BATCH // size), "num_steps": 3}


def _cards(scale: Scale) -> Iterator[Check]:
    for name, gigabytes, low, high in scale.cards:
        for form, techniques in FORMS.items():
            settings = {
                **scale.model(name, sequence_length=scale.long_length, budget=scale.budget(gigabytes)),
                **techniques,
            }
            yield Check(
                what=f"GPT-2 {name} in {gigabytes} GB: largest micro-batch of {MICRO_BATCHES[-1]} at most",
                condition=f"{form}, {scale.long_length} tokens, budget {scale.budget(gigabytes)}",
                unit="sequences",
                claimed=Claimed(high, math.inf, f"{low} to {high}"),
                runs=tuple({**settings, **_cut(size)} for size in fitting(scale, settings)),
                figure=largest_micro_batch,
            )


def _billion(scale: Scale) -> Iterator[Check]:
    for form, techniques in FORMS.items():
        settings = scale.model("billion", sequence_length=scale.long_length, budget=scale.budget(8))
        yield Check(
            what="runs that complete",
            condition=f"{form}, AdamW, micro-batch 1, {scale.long_length} tokens, budget {scale.budget(8)}",
            unit="%",
            claimed=exactly(100),
            runs=({**settings, **techniques, **_cut(1)},),
            figure=completed_percent,
        )


def _beside_another(scale: Scale) -> Iterator[Check]:
    settings = scale.model("medium", sequence_length=scale.long_length, precision="fp32")
    size = fitting(scale, {**settings, "budget": scale.budget(CARD_GB)})[0]
    for what, gigabytes, percent in (
        ("runs that complete alone", CARD_GB, 100),
        ("runs that complete beside another process", CARD_GB - OTHER_PROCESS_GB, 0),
    ):
        budget = scale.budget(gigabytes)
        yield Check(
            what=what,
            condition=f"GPT-2 medium, fp32, micro-batch {size}, {scale.long_length} tokens, budget {budget}",
            unit="%",
            claimed=exactly(percent),
            runs=({**settings, **_cut(size), "budget": budget},),
            figure=completed_percent,
        )


CLAIMS = (
    Claim(
        name="cards",
        text="GPT-2 small fits 8 GB at 1-2 x 16-32, medium 16 GB at 2-4 x 8-16, large 24 GB at 4-8 x 4-8, XL 40 GB at "
        "8-16 x 2-4",
        checks=_cards,
    ),
    Claim(
        name="billion",
        text="A billion parameters train on 8 GB",
        checks=_billion,
    ),
    Claim(
        name="beside_another",
        text=f"GPT-2 medium runs out of memory on a {CARD_GB} GB card beside another process (that holds "
        f"{OTHER_PROCESS_GB} GB)",
        checks=_beside_another,
    ),
)
