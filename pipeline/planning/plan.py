"""Plans: the predicted memory of every configuration on a card, and the recommended one."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.base.contracts import Hardware
from pipeline.base.results import limited_peak
from pipeline.base.technique import Mathematics
from pipeline.config.configurations import Configurations, why_refused
from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice, Refusals, Space
from pipeline.memory.breakdown import Breakdown
from pipeline.planning.step_time import CostPrior, estimated
from pipeline.prediction.prediction import Prediction
from pipeline.runtime.shape_check import check_shapes
from pipeline.simulation.links import GPUS_PER_MACHINE

SECONDS_PER_HOUR = 3600.0


def experiments_on(
    target: Hardware, values: Mapping[str, Any], space: Space, mathematics: Mathematics
) -> tuple[list[Experiment], list[Choice], Refusals]:
    """Return the experiments of the space, their choices, and how many others were refused for each reason."""
    configurations, refusals = Configurations(values, "plan"), Counter[str]()
    experiments, choices = [], []
    for choice in space.choices:
        experiment = configurations.experiment(choice)
        reason = why_refused(experiment, choice, target, mathematics)
        if reason is None:
            experiments.append(experiment)
            choices.append(choice)
        else:
            refusals[reason] += 1
    check_shapes(experiments)
    return experiments, choices, dict(refusals.most_common())


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
    next_peak_bytes: int | None = None
    """Where the longest sequences were searched: the peak with the next length, which does not fit."""

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


def planned_row(
    choice: Choice,
    experiment: Experiment,
    prediction: Prediction,
    budget_bytes: int,
    prior: CostPrior,
    next_peak_bytes: int | None = None,
) -> PlannedRow:
    """Return the row of a prediction; the peaks of what fits are those of a run under this budget."""
    settings: Any = experiment.settings
    time = estimated(prediction, settings.accumulation_steps, prior)
    peak_within = prediction.peak_within(budget_bytes)
    reserved, device = prediction.peak_reserved_bytes, prediction.peak_device_bytes
    if reserved is not None and device is not None and peak_within is not None:
        reserved, device = peak_within, device - reserved + peak_within  # the rest is the CUDA context
    return PlannedRow(
        choice=choice,
        micro_batch_size=experiment.micro_batch_size,
        accumulation_steps=settings.accumulation_steps,
        peak_allocated_bytes=prediction.peak_allocated_bytes,
        peak_reserved_bytes=reserved,
        peak_device_bytes=device,
        fits=peak_within is not None,
        seconds=time.seconds,
        deviation=time.deviation,
        tokens=round(prediction.num_tokens),
        seconds_between=(time.overlapped_seconds, time.serial_seconds) if experiment.world_size > 1 else None,
        category_bytes=dict(prediction.breakdown.category_bytes) if prediction.breakdown else {},
        next_peak_bytes=next_peak_bytes,
    )


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
    num_cards: int = 1
    """Cards of the machine."""
    gpus_per_host: int = GPUS_PER_MACHINE
    """More cards that train together are in several computers."""
    price_per_hour: float | None = None
    """Of all its cards, where the user has given one."""
    kind: str | None = None
    """The kind of fine-tuning, where the plan compares several."""
    unsupported: str | None = None
    """Why that kind was not planned: the card, the model or the installed packages do not support it."""
    longest_length: int | None = None
    """The longest sequences that its configuration with the smallest peak can train; None where it is not known."""
    num_configurations: int | None = None
    """Configurations of the space, where only those are predicted that may be the fastest; None: all are."""
    lengths_up_to: int | None = None
    """The longest sequences that were tried, where each choice has the longest that fit; None: they are given."""

    @property
    def name(self) -> str:
        """The card, with the kind of fine-tuning and the effective batch where the plan has several."""
        card = self.card if self.kind is None else f"{self.card}, {self.kind}"
        size = self.effective_batch_size
        return card if size is None else f"{card} (effective batch {size})"

    @property
    def recommended(self) -> PlannedRow | None:
        """Return the first configuration in this order; None if nothing fits."""
        return min((row for row in self.rows if row.fits), key=self.order, default=None)

    def price(self, row: PlannedRow) -> float | None:
        """Return what a billion tokens cost with a configuration; None where no price is known."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour / SECONDS_PER_HOUR * 1e9 / row.tokens_per_second

    def order(self, row: PlannedRow) -> tuple[float, ...]:
        """Return the sort key of a row: what fits, the longest where these are searched, then what is the fastest."""
        length = 0 if self.lengths_up_to is None else row.choice["sequence_length"]
        return (not row.fits, -length, *expected_order(row))


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
    gpu: str = "auto"
    """The cards as they were asked for."""
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
