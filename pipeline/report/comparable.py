"""The conditions under which the metrics of two runs compare."""

from collections.abc import Mapping

from pipeline.config.given import written
from pipeline.training.metrics import Row

CONDITIONS: Mapping[str, tuple[str, ...]] = {
    "effective batch": ("effective_batch_size",),
    "corpus": ("corpus", "corpus_digest", "sequences", "sequence_length"),
    "device": ("device", "device_name"),
    "model": ("model",),
}
"""Conditions under which metrics compare, and the settings that record them."""
PADDED = ("fixed_length", "padded", "grouped")
"""Values of `sequences` that are one training."""


def incomparable(row: Row, other: Row) -> set[str]:
    """Return the CONDITIONS in which two runs differ."""
    return {
        condition
        for condition, names in CONDITIONS.items()
        if any(_trained(row, name) != _trained(other, name) for name in names)
    }


def of_other_data(row: Row, other: Row) -> bool:
    """Return whether the losses of two runs are those of other models or data, or of other effective batches."""
    return bool(incomparable(row, other) - {"device"})


def _trained(row: Row, name: str) -> str:
    """Return a run's setting as far as it changes the training, which padding does not."""
    text = written(row.params.get(name))
    return "padded" if name == "sequences" and text in PADDED else text
