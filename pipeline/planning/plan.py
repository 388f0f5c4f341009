"""Plans: the predicted memory of every configuration on a card, and the recommended one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.base.results import limited_peak
from pipeline.memory.breakdown import Breakdown


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """The prediction for one configuration on one card."""

    choice: Mapping[str, Any]
    """A value for each dimension, by its setting's dotted name."""
    micro_batch_size: int
    accumulation_steps: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    peak_device_bytes: int | None
    fits: bool
    seconds: float
    """Estimated seconds of one optimizer step."""
    deviation: float
    """Standard deviation of the logarithm of these seconds: 0.2 is about 20 %."""
    tokens: int
    """Tokens of a typical optimizer step, without padding."""
    seconds_between: tuple[float, float] | None = None
    """The same if all that ranks send overlaps with computing, and if none of it does; None for one rank."""
    category_bytes: Mapping[str, int] = field(default_factory=dict)
    """What is allocated at the peak, by purpose."""

    @property
    def tokens_per_second(self) -> float:
        """The estimated throughput."""
        return self.tokens / self.seconds

    @property
    def peak_bytes(self) -> int:
        """The peak that a budget limits."""
        return limited_peak(self.peak_allocated_bytes, self.peak_reserved_bytes)


def expected_order(row: PlannedRow) -> tuple[float, int]:
    """Return the sort key of expected speed: the estimated seconds per token, then the memory."""
    return (row.seconds / row.tokens, row.peak_bytes)


@dataclass(frozen=True, kw_only=True)
class CardPlan:
    """The predictions for all configurations on one card."""

    card: str
    budget_bytes: int
    rows: tuple[PlannedRow, ...]
    skipped: tuple[str, ...]
    """Why configurations were left out, a sentence each; why all were, if there is no row: the reasons alone."""
    breakdown: Breakdown | None
    """Breakdown of the peak of the recommended configuration; None if nothing fits."""
    reasons: tuple[str, ...] = ()
    """Why each value of the recommended configuration that is not the default one was chosen, a sentence each."""
    notes: tuple[str, ...] = ()
    """What training on the card needs besides memory, a sentence each."""
    effective_batch_size: int | None = None
    """Where the plan has several; None for that of the plan."""
    kind: str | None = None
    """The kind of fine-tuning, where the plan compares several."""
    unsupported: str | None = None
    """Why that kind was not planned: the card, the model or the installed packages do not support it."""
    longest_length: int | None = None
    """The longest sequences that its configuration with the smallest peak can train; None where it is not known."""
    num_configurations: int | None = None
    """Configurations of the space, where only those are predicted that may be the fastest; None: all are."""

    @property
    def name(self) -> str:
        """The card, with the kind of fine-tuning and the effective batch where the plan has several."""
        card = self.card if self.kind is None else f"{self.card}, {self.kind}"
        size = self.effective_batch_size
        return card if size is None else f"{card} (effective batch {size})"

    @property
    def recommended(self) -> PlannedRow | None:
        """Return the configuration that fits and is expected to be the fastest; None if nothing fits."""
        return min((row for row in self.rows if row.fits), key=expected_order, default=None)


@dataclass(frozen=True, kw_only=True)
class PlanFindings:
    """The results of a plan."""

    entry: str
    model: str
    effective_batch_size: int
    """The first one if `cards` has each card with several."""
    dataset_size: int
    cards: tuple[CardPlan, ...]
    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    command: str | None = None
    """What goes on from the plan on a machine with the card; None: the run of the recommended configuration."""

    @property
    def effective_batch_sizes(self) -> tuple[int, ...]:
        """All effective batches."""
        return tuple(dict.fromkeys(map(self.effective_batch_size_on, self.cards)))

    def effective_batch_size_on(self, card: CardPlan) -> int:
        """Return the effective batch that one of the cards is planned for."""
        return card.effective_batch_size or self.effective_batch_size

    @property
    def recommended(self) -> PlannedRow | None:
        """The recommended configuration for the first card; None if nothing fits."""
        return self.cards[0].recommended
