"""The longest sequences of a configuration whose predicted memory fits a budget."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment
from pipeline.planning.plan import PlannedRow
from pipeline.prediction.fake_batches import OfLength
from pipeline.prediction.predict import predict
from pipeline.prediction.prediction import Prediction

MULTIPLE = 64
"""Lengths are multiples of it, in tokens."""
LARGEST_LENGTH = 2**20
"""The longest length that is tried of a model without a limit."""


@dataclass(frozen=True, kw_only=True)
class LongestRow:
    """The longest sequences of one configuration on one card."""

    sequence_length: int | None
    """A multiple of MULTIPLE; None if not even the shortest fits."""
    planned: PlannedRow
    """The configuration at that length, or at the shortest one if none fits."""
    next_peak_bytes: int | None
    """The predicted peak at the next length, which does not fit; None at the end of the model's positions."""


@dataclass(frozen=True, kw_only=True)
class CardLengths:
    """The longest sequences of all configurations on one card."""

    card: str
    budget_bytes: int
    rows: tuple[LongestRow, ...]
    skipped: tuple[str, ...]
    """Why configurations were left out, a sentence each."""
    notes: tuple[str, ...] = ()

    @property
    def longest(self) -> LongestRow | None:
        """The configuration with the longest sequences, of equal ones the fastest expected; None if nothing fits."""
        fitting = [row for row in self.rows if row.sequence_length is not None]
        return max(fitting, key=lambda row: (row.sequence_length, row.planned.tokens_per_second), default=None)


@dataclass(frozen=True, kw_only=True)
class LongestFindings:
    """The results of a plan with sequence_length=auto."""

    entry: str
    model: str
    effective_batch_size: int
    largest_length: int
    """The longest length that was tried: the model's positions."""
    cards: tuple[CardLengths, ...]
    settings: Mapping[str, Any]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Longest:
    """A found length with its prediction, and the prediction of the next one."""

    length: int | None
    """None if not even the shortest fits: then the prediction is of the shortest."""
    experiment: Experiment
    """With that length."""
    prediction: Prediction
    next_peak_bytes: int | None


def largest_length(experiment: Experiment) -> int:
    """Return the largest multiple of MULTIPLE that the model takes.

    Raises:
        InvalidInputError: it takes fewer tokens.

    """
    limit = experiment.description.max_sequence_length or LARGEST_LENGTH
    if limit < MULTIPLE:
        raise InvalidInputError(
            f"sequence_length=auto tries multiples of {MULTIPLE}, and {experiment.settings.model} takes {limit} tokens "
            "at most; give sequence_length itself"
        )
    return limit // MULTIPLE * MULTIPLE


def longest_that_fits(experiment: Experiment, target: Hardware, budget_bytes: int, context_bytes: int) -> Longest:
    """Return the longest sequences whose predicted memory fits; the corpus gives the shape of an example, no length.

    Raises:
        InvalidInputError: as predict().

    """
    prepared = experiment.read_corpus()

    def with_length(length: int) -> Experiment:
        return Experiment(experiment.settings.model_copy(update={"sequence_length": length}))

    def predicted(length: int) -> Prediction:
        example = replace(prepared, train=OfLength(prepared.train, length))
        return predict(with_length(length), target, example, budget_bytes=budget_bytes, context_bytes=context_bytes)

    lengths = range(MULTIPLE, largest_length(experiment) + 1, MULTIPLE)
    supported = [length for length in lengths if with_length(length).unsupported(target) is None]
    if not supported:
        raise InvalidInputError(str(with_length(lengths[-1]).unsupported(target)))
    length, found, beyond = largest_fitting(supported, predicted, budget_bytes)
    return Longest(length, with_length(length or supported[0]), found, None if beyond is None else beyond.peak_bytes)


def largest_fitting(
    lengths: list[int], predicted: Callable[[int], Prediction], budget_bytes: int
) -> tuple[int | None, Prediction, Prediction | None]:
    """Return the largest length that fits where the next one does not, and the predictions of both.

    The first is None if the smallest does not fit, the last is None if the largest fits. Memory grows with the length,
    most of it in proportion: the next guess is where a straight line meets the budget, or the middle.
    """
    low, high = 0, len(lengths) - 1
    fitting = predicted(lengths[low])
    if not fitting.fits(budget_bytes):
        return None, fitting, fitting
    beyond = fitting if high == low else predicted(lengths[high])
    if beyond.fits(budget_bytes):
        return lengths[high], beyond, None
    is_middle = False
    while high - low > 1:
        share = 0.5 if is_middle else _share(fitting.peak_bytes, beyond.peak_bytes, budget_bytes)
        middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        width = high - low
        guess = predicted(lengths[middle])
        if guess.fits(budget_bytes):
            low, fitting = middle, guess
        else:
            high, beyond = middle, guess
        is_middle = not is_middle and high - low > width / 2
    return lengths[low], fitting, beyond


def _share(low_bytes: int, high_bytes: int, budget_bytes: int) -> float:
    """Return how far the budget is from the first peak to the second, as a share."""
    return (budget_bytes - low_bytes) / (high_bytes - low_bytes) if high_bytes > low_bytes else 0.5
