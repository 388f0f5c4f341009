"""What every configuration of a space would need on a card, and which one to start with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.base.results import limited_peak
from pipeline.memory.breakdown import Breakdown


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """What one configuration would need on one card."""

    choice: Mapping[str, Any]
    """A value for each dimension, by its setting's dotted name."""
    micro_batch_size: int
    accumulation_steps: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    peak_device_bytes: int | None
    fits: bool
    flops: int
    """Floating-point operations of one optimizer step, recomputation included."""
    tokens: int
    """Tokens of one optimizer step."""
    is_16_bit: bool
    """Whether matrix products compute in a format of 16 bits."""

    @property
    def peak_bytes(self) -> int:
        """The peak that a budget limits."""
        return limited_peak(self.peak_allocated_bytes, self.peak_reserved_bytes)


def expected_order(row: PlannedRow) -> tuple[bool, float, int]:
    """Return the key that puts the expected fastest first: 16-bit formats, fewer operations a token, fewer passes.

    An estimate from counted operations, not a measurement: how fast a card is, only the card says.
    """
    return (not row.is_16_bit, row.flops / row.tokens, row.accumulation_steps)


@dataclass(frozen=True, kw_only=True)
class CardPlan:
    """What every configuration would need on one card."""

    card: str
    budget_bytes: int
    rows: tuple[PlannedRow, ...]
    skipped: tuple[str, ...]
    """Why configurations were left out, a sentence each."""
    anatomy: Breakdown | None
    """The peak of the recommended configuration; None where nothing fits."""

    @property
    def recommended(self) -> PlannedRow | None:
        """Return what to begin with: of those that fit, the one that should be the fastest."""
        return min((row for row in self.rows if row.fits), key=expected_order, default=None)


@dataclass(frozen=True, kw_only=True)
class PlanFindings:
    """All that the report of a plan is made from."""

    entry: str
    model: str
    effective_batch_size: int
    dataset_size: int
    cards: tuple[CardPlan, ...]
    settings: Mapping[str, Any]
    environment: Mapping[str, str]

    @property
    def recommended(self) -> PlannedRow | None:
        """Return what to begin with on the first card; None where nothing fits it."""
        return self.cards[0].recommended
