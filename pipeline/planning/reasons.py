"""Why a configuration is recommended: for each of its values, what the configuration without it would need."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.base.by_key import summed
from pipeline.base.units import MIB
from pipeline.config.given import written
from pipeline.config.space import MICRO_BATCH, Choice, size_of
from pipeline.memory.breakdown import Breakdown
from pipeline.planning.plan import PlannedRow, expected_order

HEAD = ("lm_head", "loss")
"""Modules whose tensors are logits and what is computed from them, as transformers and the recorder name them."""
SMALLEST_SHARE = 0.1
"""Share of a peak from which on a sentence names the part that saves so much."""


def compared(rows: Mapping[int, PlannedRow], choices: Sequence[Choice], default_values: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the fastest configuration that fits, and of those with the default for one of its values.

    Of the micro-batch size it is the next larger one. If none fits, it is the number of the one with the smallest peak.
    """
    if not rows:
        return []
    fitting = [number for number in rows if rows[number].fits]
    if not fitting:
        return [min(rows, key=lambda number: rows[number].peak_bytes)]
    fastest = min(fitting, key=lambda number: expected_order(rows[number]))
    beside = _beside(rows[fastest], map(size_of, choices), default_values).values()
    return [fastest, *(number for number, choice in enumerate(choices) if choice in beside)]


def reasons_for(
    best: PlannedRow, rows: Sequence[PlannedRow], breakdowns: Sequence[Breakdown | None], defaults: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return a sentence for each value of the recommended configuration that is not the default one.

    It says what the peak or the time of training would be with the default value and all else equal. `breakdowns` are
    those of the rows, where they are known; `defaults` are by dotted name. A configuration that is not among the rows
    says nothing.
    """
    number_of = {tuple(row.choice.items()): number for number, row in enumerate(rows)}
    own = breakdowns[number_of[tuple(best.choice.items())]]
    sentences = []
    for name, choice in _beside(best, (row.micro_batch_size for row in rows), defaults).items():
        number = number_of.get(tuple(choice.items()))
        if number is None:
            continue
        what = "" if name == MICRO_BATCH else _saved(breakdowns[number], own)
        consequence = _consequence(best, rows[number], what)
        if consequence:
            sentences.append(f"{name}={written(choice[name])} {consequence}.")
    return tuple(sentences)


def _beside(best: PlannedRow, sizes: Iterable[int], defaults: Mapping[str, Any]) -> dict[str, Choice]:
    """Return, by dimension, the best configuration with its default value, or with the next larger micro-batch."""
    larger = min((size for size in sizes if size > best.micro_batch_size), default=best.micro_batch_size)
    others = {**defaults, MICRO_BATCH: larger}
    own = best.choice.items()
    return {name: {**best.choice, name: others[name]} for name, value in own if others.get(name, value) != value}


def _consequence(best: PlannedRow, other: PlannedRow, what: str) -> str:
    """Return what the other configuration would need that the best one does not."""
    if not other.fits:
        return f"would peak at {other.peak_bytes / MIB:,.0f} MiB{what}, which does not fit"
    slower = 100 * (best.tokens_per_second / other.tokens_per_second - 1)
    if slower >= 0.5:
        return f"would take {slower:,.0f} % longer"
    return f"would peak at {other.peak_bytes / MIB:,.0f} MiB{what}" if other.peak_bytes > best.peak_bytes else ""


def _saved(other: Breakdown | None, own: Breakdown | None) -> str:
    """Return the part of the other configuration in which the best one saves most, with its share of the peak."""
    if other is None or own is None:
        return ""
    parts = _by_part(other)
    saved = parts - _by_part(own)
    part = max(saved, key=saved.__getitem__, default=None)
    if part is None or saved[part] < SMALLEST_SHARE * other.peak_bytes:
        return ""
    return f" ({100 * parts[part] / other.peak_bytes:.0f} % of it for {part})"


def _by_part(breakdown: Breakdown) -> Counter[str]:
    """Return the bytes of the logits, of the layers and of all else."""
    return summed((_part_of(module), num_bytes) for module, num_bytes in breakdown.module_bytes.items())


def _part_of(module: str) -> str:
    names = module.split(".")
    if names[-1] in HEAD:
        return "the logits"
    return "the layers" if any(name.isdigit() for name in names) else module or "the model"
