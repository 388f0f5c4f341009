"""What a full fine-tuning would need in the type of its checkpoint, in which transformers loads weights by default."""

from typing import Any

from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment

TYPES_OF_16_BITS = ("bfloat16", "float16")


def published_type_note(experiment: Experiment) -> str | None:
    """Return what the same fine-tuning of all weights would need if they stayed in the 16 bits of their checkpoint.

    None if it trains other weights: those of an adapter, in bfloat16, random ones, or those of another checkpoint.
    """
    name, settings = experiment.description.published_type, experiment.settings
    values = settings.model_dump()
    if name not in TYPES_OF_16_BITS or values["adapter"] != "none" or values["weights"] != "float32":
        return None
    note = f"transformers loads {settings.model} in {name} by default, and here its weights are float32"
    changes: dict[str, Any] = {"weights": "bfloat16"}
    try:
        from pipeline.prediction.summary import prediction_of  # imported after the training has started

        peak_mib = prediction_of(Experiment(settings.model_copy(update=changes))).peak_bytes / MIB
    except Exception:  # a device or a lever that does not go with it, or any error of the model's code
        return note
    return f"{note}; with weights=bfloat16 it would need {peak_mib:,.1f} MiB"
